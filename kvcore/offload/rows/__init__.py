# SPDX-License-Identifier: Apache-2.0
"""Rows that sparse attention selects: kept on the device, read from the full cache on the host."""
