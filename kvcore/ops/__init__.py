# SPDX-License-Identifier: Apache-2.0
"""The operators: each one's signature, its rules, and what a SoC would say of a call."""
