# SPDX-License-Identifier: Apache-2.0
"""One call of an operator on an NPU, in its two phases; each operator has a file here."""
