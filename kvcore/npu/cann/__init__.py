# SPDX-License-Identifier: Apache-2.0
"""The C interface of CANN: found, loaded, declared, its statuses as errors."""
