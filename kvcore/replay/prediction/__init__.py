# SPDX-License-Identifier: Apache-2.0
"""Deployments held against measurements: what is fitted, what is predicted, how sure that is."""
