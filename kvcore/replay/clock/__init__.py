# SPDX-License-Identifier: Apache-2.0
"""Times of steps from figures, without running them."""
