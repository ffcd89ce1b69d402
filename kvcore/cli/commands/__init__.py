# SPDX-License-Identifier: Apache-2.0
"""The sub-commands, found by being here."""
