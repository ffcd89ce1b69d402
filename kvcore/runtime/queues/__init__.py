# SPDX-License-Identifier: Apache-2.0
"""What was launched, in order, and the threads that take it from there, whatever the driver."""
