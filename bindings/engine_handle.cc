// SPDX-License-Identifier: Apache-2.0
#include "engine_handle.h"

#include "bindings.h"
#include "bitopk/kernels/error.h"
#include "bitopk/shared_communicator.h"

namespace bitopk::python {
namespace py = pybind11;

namespace {

DType DTypeNamed(const std::string& name, const std::string& where) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kInt32, DType::kInt64}) {
    if (name == DTypeName(dtype)) return dtype;
  }
  throw InvalidArgumentError(where + ": must be float32, float64, int32 or int64; got " + name);
}

void CheckArray(const TensorSpec& spec, const py::array& array, const char* what) {
  const std::string where = std::string(what) + " of \"" + spec.name + "\"";
  const DType dtype = DTypeOf(array, where);
  BITOPK_CHECK_ARG(dtype == spec.dtype, where, ": registered as ", DTypeName(spec.dtype), "; got ",
                   DTypeName(dtype));
  BITOPK_CHECK_ARG(static_cast<std::size_t>(array.size()) == spec.num_entries, where,
                   ": registered with ", spec.num_entries, " entries; got ", array.size());
  BITOPK_CHECK_ARG((array.flags() & py::array::c_style) != 0, where, ": must be C-contiguous");
}

}  // namespace

EngineHandle::EngineHandle(std::shared_ptr<Communicator> communicator, const Config& config)
    : communicator_(std::move(communicator)),
      engine_(
          std::make_unique<Engine>(std::make_unique<SharedCommunicator>(communicator_), config)) {}

std::unique_ptr<EngineHandle> EngineHandle::Sibling(const Config& config) const {
  engine();  // refuses a closed one
  return std::make_unique<EngineHandle>(communicator_, config);
}

Engine& EngineHandle::engine() const {
  if (engine_ == nullptr) throw Error("the group was closed");
  return *engine_;
}

void EngineHandle::Close() {
  {
    const py::gil_scoped_release release;
    engine_.reset();
    communicator_.reset();
  }
  arrays_.clear();
}

void EngineHandle::Register(
    const std::vector<std::tuple<std::string, std::size_t, std::string, kernels::ValueFormat>>&
        tensors) {
  std::vector<TensorSpec> specs;
  for (const auto& [name, num_entries, dtype, result_format] : tensors) {
    specs.push_back(
        {name, num_entries, DTypeNamed(dtype, "tensor \"" + name + "\""), result_format});
  }
  engine().Register(std::move(specs));
}

void EngineHandle::BeginStep(Op op, double scale, const std::vector<double>& tensor_scales) {
  {
    const py::gil_scoped_release release;
    engine().BeginStep(op, scale, tensor_scales);
  }
  arrays_.clear();
}

void EngineHandle::Submit(const Submission& submission) {
  const TensorSubmission checked = Check(submission);
  arrays_.push_back(submission);
  const py::gil_scoped_release release;
  engine().Submit(std::get<0>(submission), checked);
}

void EngineHandle::EndStep() {
  const py::gil_scoped_release release;
  engine().EndStep();
}

void EngineHandle::StartStep(Op op, double scale, const std::vector<Submission>& submissions) {
  std::vector<TensorSubmission> checked;
  for (const Submission& submission : submissions) checked.push_back(Check(submission));
  BeginStep(op, scale, {});
  arrays_ = submissions;
  const py::gil_scoped_release release;
  for (std::size_t i = 0; i < checked.size(); ++i) {
    engine().Submit(std::get<0>(submissions[i]), checked[i]);
  }
  engine().EndStep();
}

TensorSubmission EngineHandle::Check(const Submission& submission) const {
  const auto& [tensor, gradient, result] = submission;
  BITOPK_CHECK_ARG(tensor < engine().tensors().size(), "submit: tensor ", tensor, " of ",
                   engine().tensors().size());
  const TensorSpec& spec = engine().tensors()[tensor];
  CheckArray(spec, gradient, "gradient");
  TensorSubmission checked;
  checked.gradient = gradient.data();
  if (result) {
    CheckArray(spec, *result, "result");
    BITOPK_CHECK_ARG(result->writeable(), "result of \"", spec.name, "\": must be writable");
    checked.result = const_cast<void*>(result->data());
  }
  return checked;
}

}  // namespace bitopk::python
