// The launcher of moments: divides the rows into shares, lays out the workspace, starts both
// stages.

#include <algorithm>

#include "moments.cuh"

namespace metselect {
namespace {

// With fewer rows than classes a share would write more to its slot than it reads.
constexpr int64_t kLeastRows = 128;

int tiles_of(const MetselectMomentsLayer& layer) {
  return std::max<int>(1, int((layer.width + kSide - 1) / kSide));
}

// Returns the launch of layers [from, from + kMaxLayers) of a batch, without its workspace.
MomentsPlan plan_of(const MetselectMomentsBatch& batch, int64_t from) {
  MomentsPlan plan = {};
  plan.labels = batch.labels;
  plan.count = from == 0 ? batch.count : nullptr;
  plan.n = batch.n;
  plan.classes = batch.classes;
  plan.accumulate = batch.accumulate;
  plan.n_layers = int(std::min<int64_t>(kMaxLayers, batch.n_layers - from));
  for (int depth = 0; depth < plan.n_layers; ++depth) {
    MomentsLayer& layer = plan.layer[depth];
    static_cast<MetselectMomentsLayer&>(layer) = batch.layers[from + depth];
    layer.tiles = tiles_of(layer);
    layer.first_piece = plan.pieces;
    plan.pieces += pieces_of(layer.tiles);
  }
  const int64_t wanted = batch.blocks / plan.pieces;
  const int64_t useful = batch.n / std::max(kLeastRows, 2 * batch.classes);
  plan.shares = int(std::max<int64_t>(1, std::min(wanted, useful)));
  return plan;
}

int64_t workspace_size(const MomentsPlan& plan) {
  int64_t size = 0;
  for (int depth = 0; depth < plan.n_layers; ++depth) {
    size += plan.shares * slot_size(plan.layer[depth], plan.classes);
  }
  return size;
}

void lay_out(MomentsPlan& plan, double* workspace) {
  for (int depth = 0; depth < plan.n_layers; ++depth) {
    plan.layer[depth].slots = workspace;
    workspace += plan.shares * slot_size(plan.layer[depth], plan.classes);
  }
}

cudaError_t launch(const MomentsPlan& plan, int dtype, cudaStream_t stream) {
  const dim3 blocks(plan.pieces * plan.shares);
  switch (dtype) {
    case kMetselectFloat:
      METSELECT_LAUNCH((moments_of_shares<float, float>), blocks, kThreads, stream, plan);
      break;
    case kMetselectDouble:
      METSELECT_LAUNCH((moments_of_shares<double, double>), blocks, kThreads, stream, plan);
      break;
    case kMetselectHalf:
      METSELECT_LAUNCH((moments_of_shares<__half, float>), blocks, kThreads, stream, plan);
      break;
    case kMetselectBfloat16:
      METSELECT_LAUNCH((moments_of_shares<__nv_bfloat16, float>), blocks, kThreads, stream, plan);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  int64_t entries = 0;
  for (int depth = 0; depth < plan.n_layers; ++depth) {
    entries = std::max(entries, slot_size(plan.layer[depth], plan.classes));
  }
  const dim3 grid(unsigned((entries + kThreads - 1) / kThreads), plan.n_layers);
  METSELECT_LAUNCH(moments_of_slots, grid, kThreads, stream, plan);
  return cudaGetLastError();
}

}  // namespace
}  // namespace metselect

using namespace metselect;

extern "C" int32_t metselect_moments_blocks() {
  int device = 0, processors = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  return kBlocksPerProcessor * processors;
}

extern "C" int64_t metselect_moments_workspace_bytes(const MetselectMomentsBatch* batch) {
  int64_t size = 0;
  for (int64_t from = 0; from < batch->n_layers; from += kMaxLayers) {
    size = std::max(size, workspace_size(plan_of(*batch, from)));
  }
  return size * int64_t(sizeof(double));
}

extern "C" int32_t metselect_moments(const MetselectMomentsBatch* batch, void* workspace,
                                     void* stream) {
  for (int64_t from = 0; from < batch->n_layers; from += kMaxLayers) {
    MomentsPlan plan = plan_of(*batch, from);
    lay_out(plan, static_cast<double*>(workspace));
    const cudaError_t error = launch(plan, batch->dtype, static_cast<cudaStream_t>(stream));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}
