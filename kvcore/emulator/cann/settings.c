// SPDX-License-Identifier: Apache-2.0
// The machine's defaults, which kvdouble_soc and kvdouble_devices change.
#include "machine.h"

const char *const kvd_built_soc = "Ascend910_9391";
const int kvd_built_devices = 1;
