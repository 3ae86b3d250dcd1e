// SPDX-License-Identifier: Apache-2.0
//
// A Communicator over collectives that Python lends, such as those of torch.distributed; see
// integration/bitopk/torch/lent.py.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "bitopk/communicator.h"

namespace bitopk::python {

/// Makes a communicator that moves bytes by the methods of `collectives`:
///
///   all_to_all(parts, sizes, what, timeout, aborted) -> list of bytes-like
///     Sends parts[r] to rank r; returns what each rank sent to this one, sizes[r] bytes.
///   all_gather(part, sizes, what, timeout, aborted) -> list of bytes-like
///     Sends `part` to all ranks. sizes[r] is the length of rank r's part, this rank's own
///     included, and the same on all ranks.
///   all_reduce(values, what, timeout, aborted)
///     Replaces a memoryview of int64 (sums modulo 2^64) or float32 by the sum over ranks.
///   close()
///     No other call follows. Peers that wait for this rank should learn that it is gone.
///
/// `what` begins the text of an error, `timeout` is in seconds, and aborted() says that the call
/// should be given up; it must be asked at least every few milliseconds of a wait, which must
/// release the GIL. Arguments may be read (values: written) until the call returns or raises. The
/// communication thread makes the calls, one at a time and in the same order on all ranks, so the
/// collectives must be apart from those that the program makes itself. Ranks that disagree about
/// the call they are in meet in the same all_to_all of fixed size, whose headers tell them so.
///
/// Any exception of a method becomes a CommunicationError and ends the communicator. close() is
/// called then, at the latest by the destructor, and otherwise when the interpreter exits (a call
/// under way is aborted and waited for), so that no thread asks for the GIL of an interpreter that
/// is gone. Nobody may wait for a call of the communicator, Abort included, while holding the GIL.
///
/// Parts of up to 1 KiB travel in the first collective; only if some rank has a larger one is
/// there a second. The time-out is for each collective as a whole, so a message must get through in
/// that time. The byte counters count headers and payloads, not what the host adds to them.
///
/// REQUIRES: the GIL is held. @throws InvalidArgumentError  if an argument is out of range.
std::unique_ptr<Communicator> MakeLentCommunicator(int rank, int size, double timeout,
                                                   pybind11::object collectives);

}  // namespace bitopk::python
