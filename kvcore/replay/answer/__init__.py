# SPDX-License-Identifier: Apache-2.0
"""Is offload worth it here: a run beside its baseline, and what decides between them."""
