# SPDX-License-Identifier: Apache-2.0
"""The driver of this machine: workers run the operations, on its own time or on a model's."""
