// SPDX-License-Identifier: Apache-2.0
// The host follows a device pointer: a message on stderr, and the process ends as it would without.
// The handler takes itself away and returns, so that the same instruction meets the handler that was
// there before: Python's faulthandler, which prints the lines, or the system.
#include "machine.h"

#include <signal.h>
#include <stdio.h>
#include <unistd.h>

static struct sigaction before;

static void on_fault(int number, siginfo_t *info, void *context) {
    (void)context;
    if (info->si_code > 0 && kvd_is_device_address(info->si_addr)) {
        static char text[160];
        int size = snprintf(text, sizeof text,
                            "kvcore.emulator: memcheck: the host follows a device pointer, %p: only tasks "
                            "and copies reach device memory\n", info->si_addr);
        ssize_t written = write(2, text, (size_t)size);
        (void)written;
    }
    sigaction(number, &before, NULL);
}

// Puts the handler in front of the one that is there, and again when another one was put before it.
void kvdouble_watch_faults(void) {
    struct sigaction now, own = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    sigemptyset(&own.sa_mask);
    if (sigaction(SIGSEGV, NULL, &now) || now.sa_sigaction == on_fault) return;
    before = now;
    sigaction(SIGSEGV, &own, NULL);
}
