#include "collectives.h"

#include <map>
#include <mutex>

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "operators.h"
#include "streams.h"

namespace pretend {
namespace {

using c10d::Work;
using Tensors = std::vector<at::Tensor>;

// Is over when the other backend's is and the result was copied back, by a stream of the backend's own.
class Ours final : public Work {
 public:
  Ours(int rank, c10::intrusive_ptr<Work> over, c10::Stream stream, Count count, Tensors outputs, bool blocks)
      : Work(rank), over_(std::move(over)), stream_(stream), count_(count), outputs_(std::move(outputs)),
        blocks_(blocks), future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream.device()})) {
    c10::StreamGuard guard(stream_);
    future_->markCompleted(c10::IValue(outputs_));
  }
  bool isCompleted() override {
    return poll(stream_, count_);
  }
  bool isSuccess() const override {
    return done(stream_) >= count_ && over_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return over_->exception();
  }
  int sourceRank() const override {
    return over_->sourceRank();
  }
  Tensors result() override {
    return outputs_;
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    auto current = current_stream(stream_.device_index());
    let_wait(current, stream_, count_);
    if (blocks_) {
      pretend::finish(current);
    }
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  c10::intrusive_ptr<Work> over_;
  c10::Stream stream_;
  Count count_;
  Tensors outputs_;
  bool blocks_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Collectives final : public c10d::Backend {
 public:
  Collectives(c10::intrusive_ptr<c10d::Backend> over, int rank, int size) : Backend(rank, size), over_(std::move(over)) {}

  const std::string getBackendName() const override {
    return "pccl";
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    over_->setTimeout(timeout);
  }
  void abort() override {
    over_->abort();
  }
  void shutdown() override {
    over_->shutdown();
  }

  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto sent = taken(tensors);
    return given_back(over_->broadcast(sent, options), {{sent, tensors}});
  }
  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto sent = taken(tensors);
    return given_back(over_->allreduce(sent, options), {{sent, tensors}});
  }
  c10::intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors,
                                               const c10d::AllreduceCoalescedOptions& options) override {
    auto sent = taken(tensors);
    return given_back(over_->allreduce_coalesced(sent, options), {{sent, tensors}});
  }
  c10::intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto sent = taken(tensors);
    return given_back(over_->reduce(sent, options), {{sent, tensors}});
  }
  c10::intrusive_ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& options) override {
    auto sent = taken(inputs);
    auto got = taken(outputs);
    return given_back(over_->allgather(got, sent, options), paired(got, outputs));
  }
  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions& options) override {
    auto sent = taken(input).flatten(), got = taken(output).flatten();
    return given_back(over_->_allgather_base(got, sent, options), {{{got.view(output.sizes())}, {output}}});
  }
  c10::intrusive_ptr<Work> allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                               const c10d::AllgatherOptions& options) override {
    auto sent = taken(inputs);
    auto got = taken(outputs);
    return given_back(over_->allgather_coalesced(got, sent, options), paired(got, outputs));
  }
  c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllgatherOptions& options) override {
    auto sent = taken(inputs), got = taken(outputs);
    return given_back(over_->allgather_into_tensor_coalesced(got, sent, options), {{got, outputs}});
  }
  c10::intrusive_ptr<Work> gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                  const c10d::GatherOptions& options) override {
    auto sent = taken(inputs);
    auto got = taken(outputs);
    return given_back(over_->gather(got, sent, options), paired(got, outputs), inputs);
  }
  c10::intrusive_ptr<Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                   const c10d::ScatterOptions& options) override {
    auto sent = taken(inputs);
    auto got = taken(outputs);
    return given_back(over_->scatter(got, sent, options), {{got, outputs}});
  }
  c10::intrusive_ptr<Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    auto sent = taken(inputs);
    auto got = taken(outputs);
    return given_back(over_->reduce_scatter(got, sent, options), {{got, outputs}});
  }
  c10::intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::ReduceScatterOptions& options) override {
    auto sent = taken(input).flatten(), got = taken(output).flatten();
    return given_back(over_->_reduce_scatter_base(got, sent, options), {{{got.view(output.sizes())}, {output}}});
  }
  c10::intrusive_ptr<Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::ReduceScatterOptions& options) override {
    auto sent = taken(inputs), got = taken(outputs);
    return given_back(over_->reduce_scatter_tensor_coalesced(got, sent, options), {{got, outputs}});
  }
  c10::intrusive_ptr<Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& out_sizes,
                                         std::vector<int64_t>& in_sizes, const c10d::AllToAllOptions& options) override {
    auto sent = taken(input), got = taken(output);
    return given_back(over_->alltoall_base(got, sent, out_sizes, in_sizes, options), {{{got}, {output}}});
  }
  c10::intrusive_ptr<Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto sent = taken(inputs), got = taken(outputs);
    return given_back(over_->alltoall(got, sent, options), {{got, outputs}});
  }
  c10::intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
    auto sent = taken(tensors);
    return given_back(over_->send(sent, to, tag), {}, tensors);
  }
  c10::intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    auto got = taken(tensors);
    return given_back(over_->recv(got, from, tag), {{got, tensors}});
  }
  c10::intrusive_ptr<Work> recvAnysource(Tensors& tensors, int tag) override {
    auto got = taken(tensors);
    return given_back(over_->recvAnysource(got, tag), {{got, tensors}});
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    auto plain = options;
    plain.device_ids.clear();
    plain.device.reset();
    auto device = options.device ? options.device->index()
                  : options.device_ids.empty() ? current_device() : static_cast<Index>(options.device_ids[0]);
    finish(current_stream(device));
    return made(over_->barrier(plain), {}, {}, device, true);
  }

 private:
  using Pairs = std::vector<std::pair<Tensors, Tensors>>;

  // A copy for the other backend, after all that the current stream was given.
  at::Tensor taken(const at::Tensor& tensor) {
    TORCH_CHECK(tensor.device().type() == kType, "pccl: tensors of the pretended devices only, not of ",
                tensor.device(), ". No backend type associated with device type ", tensor.device().type());
    {
      std::lock_guard<std::mutex> hold(lock_);
      TORCH_CHECK(device_ < 0 || tensor.device().index() == device_, "pccl: this group's device is ", int(device_),
                  ", and a tensor is on ", int(tensor.device().index()));
      device_ = tensor.device().index();
    }
    finish(current_stream(tensor.device().index()));
    auto copied = at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
    copy_now(copied, on_cpu(tensor));
    return copied;
  }
  Tensors taken(const Tensors& tensors) {
    Tensors all;
    for (const auto& each : tensors) {
      all.push_back(taken(each));
    }
    return all;
  }
  std::vector<Tensors> taken(const std::vector<Tensors>& tensors) {
    std::vector<Tensors> all;
    for (const auto& each : tensors) {
      all.push_back(taken(each));
    }
    return all;
  }

  static Pairs paired(const std::vector<Tensors>& got, const std::vector<Tensors>& outputs) {
    Pairs all;
    for (size_t i = 0; i < got.size(); i++) {
      all.emplace_back(got[i], outputs[i]);
    }
    return all;
  }

  c10::intrusive_ptr<Work> given_back(c10::intrusive_ptr<Work> work, const Pairs& pairs, Tensors others = {}) {
    Tensors outputs;
    for (const auto& [_, targets] : pairs) {
      outputs.insert(outputs.end(), targets.begin(), targets.end());
    }
    if (outputs.empty()) {
      outputs = std::move(others);
    }
    return made(std::move(work), pairs, outputs, device_, false);
  }

  c10::intrusive_ptr<Work> made(c10::intrusive_ptr<Work> work, const Pairs& pairs, Tensors outputs, Index device,
                                bool blocks) {
    std::unique_lock<std::mutex> hold(lock_);
    auto found = streams_.find(device);
    auto stream = found == streams_.end() ? streams_.emplace(device, new_stream(device)).first->second : found->second;
    hold.unlock();
    auto targets = pairs;
    for (auto& [_, to] : targets) {
      for (auto& each : to) {
        each = on_cpu(each);  // which keeps its memory until then
      }
    }
    auto run = [work, targets] {
      work->wait();
      for (const auto& [from, to] : targets) {
        for (size_t i = 0; i < from.size(); i++) {
          copy_now(to[i], from[i]);
        }
      }
    };
    auto count = give(stream, {run, [work] { return work->isCompleted(); }});
    return c10::make_intrusive<Ours>(rank_, work, stream, count, std::move(outputs), blocks);
  }

  std::mutex lock_;
  c10::intrusive_ptr<c10d::Backend> over_;
  std::map<Index, c10::Stream> streams_;
  Index device_ = -1;
};

// Without one DDP warns that it knows no times of such devices.
class Timer final : public c10d::Timer {
 public:
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    return getTimeRef(end) - getTimeRef(start);
  }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_collectives(c10::intrusive_ptr<c10d::Backend> over, int rank, int size) {
  return c10::make_intrusive<Collectives>(std::move(over), rank, size);
}

}  // namespace pretend

namespace c10d {

using PretendTimer = pretend::Timer;
C10_REGISTER_TYPED_CLASS(TimerRegistry, pretend::kType, PretendTimer);

}  // namespace c10d
