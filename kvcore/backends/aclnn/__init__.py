# SPDX-License-Identifier: Apache-2.0
"""Where kvcore.npu was: only the command of the self test is still found here, until 0.4."""
