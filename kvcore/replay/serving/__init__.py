# SPDX-License-Identifier: Apache-2.0
"""Serving a trace: one loop (`replay`), a scheduler, and strategies that have bytes and time.

scheduler               which request does what in the next step
strategy                what the loop leaves to a strategy
resident                real caches on this machine
in_full, sampled        the full cache on the host of a modelled device, all real or a sample
on_device, tiered       the full cache on the modelled device, without and with slower tiers
"""
