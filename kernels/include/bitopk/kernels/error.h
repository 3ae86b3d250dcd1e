// SPDX-License-Identifier: Apache-2.0
//
// The error types of every layer. They live with the kernels, the lowest layer, because everything
// above throws them too. A message says where, what, got and expected; see BITOPK_CHECK_ARG.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace bitopk {

/// Base of all errors thrown by bitopk.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller passed something that cannot be served; nothing was changed.
class InvalidArgumentError : public Error {
 public:
  using Error::Error;
};

/// A peer sent bytes that break the wire format.
class WireFormatError : public Error {
 public:
  using Error::Error;
};

/// A peer died, stopped answering in time, or disagreed about what comes next. The communicator is
/// dead afterwards; memories stand as they did before the step.
class CommunicationError : public Error {
 public:
  using Error::Error;
};

/// A gradient held NaN or Inf and the policy is `raise`. Every rank throws it in the same step.
class NonFiniteGradientError : public Error {
 public:
  using Error::Error;
};

/// Ranks hold different results although they must be identical.
class ReplicaDivergenceError : public Error {
 public:
  using Error::Error;
};

namespace internal {
/// Concatenates its arguments through a stream.
template <typename... Args>
std::string StrCat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}
}  // namespace internal

}  // namespace bitopk

/// Throws InvalidArgumentError with the concatenated message unless `condition` holds.
#define BITOPK_CHECK_ARG(condition, ...)                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      throw ::bitopk::InvalidArgumentError(::bitopk::internal::StrCat(__VA_ARGS__)); \
    }                                                                                \
  } while (false)
