# SPDX-License-Identifier: Apache-2.0
"""Models as data: what a token keeps, and what a step costs."""
