// moments: class sums and shifted Gram matrices of all layers in one pass over the picked rows.
//
//   r_i = h_i - shift[y_i],  sum[c] = sum of r_i over y_i = c,  gram = sum of r_i r_i^T
//
// Stage 1: a block computes one kSide x kSide piece of the upper triangle of one Gram matrix from
// one share of the rows; a piece on the diagonal also computes the class sums of its columns.
// Products of a tile of rows are in T, sums over tiles in float64. A tile whose largest entry is
// outside 2^+-40 is first scaled by a power of two, so that squares neither overflow nor underflow.
// Each block writes to its own slot. Stage 2: the slots are added in the order of the shares. There
// are no floating-point atomics, so results depend only on the number of shares.
//
// A label or index out of range is not read; it makes all results of its layer NaN, and in the
// first layer the counts as well.
#pragma once

#include <limits.h>
#include <math.h>

#include "moments.h"
#include "portable.cuh"

namespace metselect {

constexpr int kSide = 64;
constexpr int kThreads = 256;
constexpr int kPer = 4;         // a thread computes kPer x kPer entries of the piece
constexpr int kMaxLayers = 32;  // fit in the 4 KB of kernel parameters
constexpr int kMaxExponent = 40;
constexpr int kBlocksPerProcessor = 3;

template <typename T>
constexpr int kRows = 256 / sizeof(T);  // two tiles of 16 KB: three blocks fit on an A100's SM

static_assert(kThreads * kPer * kPer == kSide * kSide && kThreads % kSide == 0, "one piece");

struct MomentsLayer : MetselectMomentsLayer {
  double* slots;    // [shares, slot_size]: pieces, class sums [C, D], counts [C]
  int first_piece;  // in the order of all pieces of all layers
  int tiles;        // of kSide columns
};

struct MomentsPlan {
  MomentsLayer layer[kMaxLayers];
  const int64_t* labels;
  double* count;  // null in all but the first launch
  int64_t n, classes;
  int n_layers, pieces, shares, accumulate;
};

static_assert(sizeof(MomentsPlan) <= 4096, "kernel parameters");

__host__ __device__ inline int pieces_of(int tiles) { return tiles * (tiles + 1) / 2; }

__host__ __device__ inline int64_t slot_size(const MomentsLayer& layer, int64_t classes) {
  return int64_t(pieces_of(layer.tiles)) * kSide * kSide + classes * (layer.width + 1);
}

struct Piece {
  int row, column;  // in tiles; row <= column
};

__host__ __device__ inline Piece piece_at(int number, int tiles) {
  int row = 0;
  for (; number >= tiles - row; ++row) number -= tiles - row;
  return {row, row + number};
}

__device__ inline float widened(float value) { return value; }
__device__ inline double widened(double value) { return value; }
__device__ inline float widened(__half value) { return __half2float(value); }
__device__ inline float widened(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
struct MomentsShared {
  alignas(16) T tile[2][kRows<T>][kSide];  // residuals of the piece's rows and of its columns
  int64_t offset[kRows<T>];                // of the row in h
  int label[kRows<T>];                     // -1: no row
  int next[kRows<T>];                      // the next row of the same class; kRows: none
  bool first[kRows<T>];                    // of its class
  int extreme[2];                          // largest exponent outside +-kMaxExponent, or INT_MIN
  bool ordinary[2];                        // some entry is within +-kMaxExponent
  bool spoiled;                            // a label or an index is out of range
};

// Writes label and offset of the rows of the tile that starts at row `start`.
template <typename T>
__device__ void locate_rows(const MomentsPlan& plan, const MomentsLayer& layer, int64_t start,
                            MomentsShared<T>& shared) {
  if (threadIdx.x < 2) {
    shared.extreme[threadIdx.x] = INT_MIN;
    shared.ordinary[threadIdx.x] = false;
  }
  if (threadIdx.x >= kRows<T>) return;
  const int64_t i = start + threadIdx.x;
  int64_t label = -1, row = 0;
  if (i < plan.n) {
    label = plan.labels[i];
    row = layer.index ? layer.index[i] : i;
    if (label < 0 || label >= plan.classes || row < 0 || row >= layer.rows) {
      shared.spoiled = true;
      label = -1, row = 0;
    }
  }
  shared.label[threadIdx.x] = int(label);
  shared.offset[threadIdx.x] = row * layer.row_stride;
}

// Links the rows of each class in order, so that each class is summed by one thread.
template <typename T>
__device__ void link_rows(MomentsShared<T>& shared) {
  if (threadIdx.x >= kRows<T>) return;
  const int i = threadIdx.x, label = shared.label[i];
  int before = i - 1, after = i + 1;
  while (before >= 0 && shared.label[before] != label) --before;
  while (after < kRows<T> && shared.label[after] != label) ++after;
  shared.first[i] = label >= 0 && before < 0;
  shared.next[i] = after;
}

// Fills one of the two tiles with residuals and records their magnitude.
template <typename In, typename T>
__device__ void fill(const MomentsLayer& layer, int tile, int side, MomentsShared<T>& shared) {
  const In* __restrict__ h = static_cast<const In*>(layer.h);
  const T* __restrict__ shift = static_cast<const T*>(layer.shift);
  const int d = threadIdx.x % kSide;
  const int64_t column = int64_t(tile) * kSide + d;
  T largest = 0;
#pragma unroll
  for (int i = threadIdx.x / kSide; i < kRows<T>; i += kThreads / kSide) {
    T r = 0;
    if (shared.label[i] >= 0 && column < layer.width) {
      r = widened(h[shared.offset[i] + column * layer.column_stride]) -
          shift[shared.label[i] * layer.width + column];
    }
    shared.tile[side][i][d] = r;
    const T size = r < 0 ? -r : r;
    largest = size > largest ? size : largest;
  }
  constexpr T kLarge = T(1ull << kMaxExponent), kSmall = 1 / kLarge;
  if ((largest <= kLarge && largest >= kSmall) || largest == T(INFINITY)) {
    shared.ordinary[side] = true;
  } else if (largest > 0) {
    int exponent;
    frexp(double(largest), &exponent);
    atomicMax(&shared.extreme[side], exponent);
  }
}

// Returns the exponent by which a tile is scaled, 0 within 2^+-kMaxExponent.
template <typename T>
__device__ int scale_of(const MomentsShared<T>& shared, int side) {
  const int exponent = shared.extreme[side];
  const bool tiny = exponent < 0;
  return exponent == INT_MIN || (tiny && shared.ordinary[side]) ? 0 : exponent;
}

template <typename T>
__device__ void scale(MomentsShared<T>& shared, int side, int exponent) {
  T* tile = &shared.tile[side][0][0];
  for (int at = threadIdx.x; at < kRows<T> * kSide; at += kThreads) {
    tile[at] = T(ldexp(double(tile[at]), -exponent));
  }
}

// Adds the rows of the tile to the class sums; a warp adds one class at a time. The sum so far is
// loaded before the loop over the rows of the class, which hides the latency of the load.
template <typename T>
__device__ void add_by_class(const MomentsShared<T>& shared, int64_t width, int tile, double* sums,
                             double* counts) {
  const int d = threadIdx.x % kSide;
  const int64_t column = int64_t(tile) * kSide + d;
  const bool counting = counts && column == 0;
  for (int first = threadIdx.x / kSide; first < kRows<T>; first += kThreads / kSide) {
    if (!shared.first[first] || (column >= width && !counting)) continue;
    const int64_t label = shared.label[first];
    double* into = sums + label * width + column;
    const double before = column < width ? *into : 0;
    double total = 0;
    int members = 0;
    for (int i = first; i < kRows<T>; i = shared.next[i], ++members) {
      total += shared.tile[0][i][d];
    }
    if (column < width) *into = before + total;
    if (counting) counts[label] += members;
  }
}

// gram += unit * left^T right, for the entries of this thread.
template <typename T>
__device__ void add_product(const T (*left)[kSide], const T (*right)[kSide], double unit,
                            double (&gram)[kPer][kPer]) {
  const int row = threadIdx.x / (kSide / kPer) * kPer, column = threadIdx.x % (kSide / kPer) * kPer;
  T product[kPer][kPer] = {};
#pragma unroll 8
  for (int i = 0; i < kRows<T>; ++i) {
    T a[kPer], b[kPer];
#pragma unroll
    for (int u = 0; u < kPer; ++u) a[u] = left[i][row + u], b[u] = right[i][column + u];
#pragma unroll
    for (int u = 0; u < kPer; ++u) {
#pragma unroll
      for (int v = 0; v < kPer; ++v) product[u][v] += a[u] * b[v];
    }
  }
#pragma unroll
  for (int u = 0; u < kPer; ++u) {
#pragma unroll
    for (int v = 0; v < kPer; ++v) gram[u][v] += unit * product[u][v];
  }
}

// Sets the class sums and counts of the tile's columns in this block's slot.
__device__ inline void set_sums(const MomentsPlan& plan, int64_t width, int tile, double value,
                                double* sums, double* counts) {
  const int64_t column = int64_t(tile) * kSide + threadIdx.x % kSide;
  for (int64_t c = threadIdx.x / kSide; c < plan.classes; c += kThreads / kSide) {
    if (column < width) sums[c * width + column] = value;
    if (counts && column == 0) counts[c] = value;
  }
}

// Block number = share * pieces + piece: pieces that read the same rows run at the same time.
template <typename In, typename T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? kBlocksPerProcessor : 2)
    moments_of_shares(const __grid_constant__ MomentsPlan plan) {
  METSELECT_SHARED(MomentsShared<T>, shared);
  const int share = blockIdx.x / plan.pieces, number = blockIdx.x % plan.pieces;
  int depth = plan.n_layers - 1;
  while (plan.layer[depth].first_piece > number) --depth;
  const MomentsLayer& layer = plan.layer[depth];
  const Piece piece = piece_at(number - layer.first_piece, layer.tiles);
  const bool diagonal = piece.row == piece.column;
  double* slot = layer.slots + share * slot_size(layer, plan.classes);
  double* sums = slot + int64_t(pieces_of(layer.tiles)) * kSide * kSide;
  double* counts = depth == 0 && plan.count ? sums + plan.classes * layer.width : nullptr;

  if (threadIdx.x == 0) shared.spoiled = false;
  if (diagonal) set_sums(plan, layer.width, piece.row, 0, sums, counts);
  double gram[kPer][kPer] = {};
  const int64_t tiles = (plan.n + kRows<T> - 1) / kRows<T>;
  const int64_t begin = tiles * share / plan.shares, end = tiles * (share + 1) / plan.shares;
  for (int64_t tile = begin; tile < end; ++tile) {
    __syncthreads();  // the tile before is done with
    locate_rows(plan, layer, tile * kRows<T>, shared);
    __syncthreads();  // rows are located
    fill<In>(layer, piece.row, 0, shared);
    if (diagonal) {
      link_rows(shared);
    } else {
      fill<In>(layer, piece.column, 1, shared);
    }
    __syncthreads();  // tiles are full
    if (diagonal) add_by_class(shared, layer.width, piece.row, sums, counts);
    const int right = diagonal ? 0 : 1;
    const int exponents[2] = {scale_of(shared, 0), scale_of(shared, right)};
    if (exponents[0] || exponents[1]) {
      __syncthreads();  // class sums were of the tile as it is
      scale(shared, 0, exponents[0]);
      if (!diagonal) scale(shared, 1, exponents[1]);
      __syncthreads();  // tiles are scaled
    }
    const double unit = ldexp(1.0, exponents[0] + exponents[1]);
    add_product(shared.tile[0], shared.tile[right], unit, gram);
  }
  __syncthreads();  // sums are complete, also those of other threads

  if (shared.spoiled && diagonal) set_sums(plan, layer.width, piece.row, NAN, sums, counts);
  double* out = slot + int64_t(number - layer.first_piece) * kSide * kSide;
  const int row = threadIdx.x / (kSide / kPer) * kPer, column = threadIdx.x % (kSide / kPer) * kPer;
#pragma unroll
  for (int u = 0; u < kPer; ++u) {
#pragma unroll
    for (int v = 0; v < kPer; ++v) {
      out[(row + u) * kSide + column + v] = shared.spoiled ? NAN : gram[u][v];
    }
  }
}

__device__ inline void put(double* out, double value, bool accumulate) {
  *out = accumulate ? *out + value : value;
}

// blockIdx.y is the layer; a thread sums one entry over its slots.
__global__ void __launch_bounds__(kThreads)
    moments_of_slots(const __grid_constant__ MomentsPlan plan) {
  const MomentsLayer& layer = plan.layer[blockIdx.y];
  const int64_t size = slot_size(layer, plan.classes);
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= size) return;
  double total = 0;
#pragma unroll 4
  for (int share = 0; share < plan.shares; ++share) total += layer.slots[share * size + at];

  const int64_t in_pieces = int64_t(pieces_of(layer.tiles)) * kSide * kSide;
  const int64_t in_sums = plan.classes * layer.width;
  if (at < in_pieces) {
    const Piece piece = piece_at(int(at / (kSide * kSide)), layer.tiles);
    const int64_t row = piece.row * kSide + at / kSide % kSide;
    const int64_t column = piece.column * kSide + at % kSide;
    if (row >= layer.width || column >= layer.width) return;
    put(layer.gram + row * layer.width + column, total, plan.accumulate);
    if (piece.row == piece.column) return;
    put(layer.gram + column * layer.width + row, total, plan.accumulate);
  } else if (at < in_pieces + in_sums) {
    put(layer.sum + (at - in_pieces), total, plan.accumulate);
  } else if (blockIdx.y == 0 && plan.count) {
    put(plan.count + (at - in_pieces - in_sums), total, plan.accumulate);
  }
}

}  // namespace metselect
