# SPDX-License-Identifier: Apache-2.0
"""What a replay found, as data, tables, pages and comparisons."""
