// SPDX-License-Identifier: Apache-2.0
// What the machine is until somebody says otherwise (kvdouble_soc, kvdouble_devices).
#include "machine.h"

const char *const kvd_built_soc = "Ascend910_9391";
const int kvd_built_devices = 1;
