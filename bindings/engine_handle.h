// SPDX-License-Identifier: Apache-2.0
//
// EngineHandle: an engine as Python holds it, with the arrays that are in flight. Every call that
// can wait releases the GIL; Python calls it from one thread at a time, except `abort`.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bitopk/communicator.h"
#include "bitopk/engine.h"

namespace bitopk::python {

/// One tensor of a step: number, gradient, result or None.
using Submission = std::tuple<std::size_t, pybind11::array, std::optional<pybind11::array>>;

class EngineHandle {
 public:
  EngineHandle(std::shared_ptr<Communicator> communicator, const Config& config);
  ~EngineHandle() { Close(); }
  EngineHandle(const EngineHandle&) = delete;
  EngineHandle& operator=(const EngineHandle&) = delete;

  /// @throws Error  after Close.
  Engine& engine() const;

  void Close();

  /// Another engine over the same connections; see SharedCommunicator for when they may be used.
  std::unique_ptr<EngineHandle> Sibling(const Config& config) const;

  /// Name, entries, type and result_format of each tensor.
  void Register(
      const std::vector<std::tuple<std::string, std::size_t, std::string, kernels::ValueFormat>>&
          tensors);

  /// Starts a step; the one before must be done. Its arrays are let go.
  void BeginStep(Op op, double scale, const std::vector<double>& tensor_scales);
  /// The arrays live as long as the engine may touch them, whatever Python drops or collects.
  void Submit(const Submission& submission);
  void EndStep();

  /// A whole step in one call, so that no interrupt leaves it half submitted.
  void StartStep(Op op, double scale, const std::vector<Submission>& submissions);

 private:
  TensorSubmission Check(const Submission& submission) const;

  std::shared_ptr<Communicator> communicator_;
  std::unique_ptr<Engine> engine_;
  std::vector<Submission> arrays_;
};

}  // namespace bitopk::python
