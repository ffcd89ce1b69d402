# SPDX-License-Identifier: Apache-2.0
"""The loops that move bytes; they know neither arrays nor layouts nor errors."""
