# SPDX-License-Identifier: Apache-2.0
"""From a call to its kernel: views of arrays, Specs with their Case, plans, the last look."""
