# SPDX-License-Identifier: Apache-2.0
"""Deployments: what a step takes of one model, on one device, in one set-up and software."""
