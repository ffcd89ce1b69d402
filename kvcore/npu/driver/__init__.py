# SPDX-License-Identifier: Apache-2.0
"""The runtime on a real NPU's queues: what ``Device(backend="aclnn")`` is made of.

Who does what
-------------
The host keeps the order of launches, as ``kvcore.runtime.abc`` has it: launches wait in their queue
until a worker comes to them, so launching never blocks, whatever the depth of the hardware's
queue.  A worker does not run an operation, it *hands it over* to the stream's aclrtStream and goes
on with the next.  From there on the hardware keeps the order: its streams are first in, first out,
a record is an aclrtEvent on the stream, a wait is aclrtStreamWaitEvent.

A mark (one record of an event) is resolved late, when it is asked for: its event is looked at by
``query``, waited for by ``synchronize_blocking``, and for ``await`` a host function is put behind
it, on a stream of its own, that rings the bell of the event loop.  What a stream was given is held
in its *flight* until a later record is known to have passed.

A failure of the hardware shows at a synchronisation.  Then the stream has failed as a modelled one
would have: what was in flight counts as not done, events behind it fail, streams that waited for
those fail too, and each reports it to its host once.  The handle is given up and a new one is made
when the stream is used again.  Streams stop on failure (aclrtSetStreamFailureMode), so an event
behind a fault may never come: all that wait ask now and then whether the stream has failed.

    device    AclDriver: opening, memory, closing       lane      AclLane: handing over, failing
    flight    what the hardware has, and how it ends    work      operations on their way to it
    records   marks that the hardware reaches, events   transfers copies and fills
    hostcalls host functions                            heap      device, pinned, swapped memory
    buffers   how such memory is shown and kept
    watch     rings, and failures with no waiter        graph     capture through aclmdlRI
    parts     what all of these need of each other      handles, turns
"""
