// selected_logits and selected_cross_entropy: logits of every node from the decoder of its layer,
// and in the same pass over tiles of nodes the loss and its gradients.
//
//   a = h W_l^T + b_l,  p = softmax(a),  loss = sum_i sum_l k_il (-log p_y),
//   k_il = [layer_i = l] / n + deep_supervision / (L n)
//   da = k (p - onehot(y)),  dh = da W,  dW = da^T h,  db = sum da
//
// With deep supervision every layer decodes all rows of a tile, otherwise the rows that selected
// it.

#include <ATen/Dispatch.h>

#include <cmath>
#include <numeric>

#include "checks.h"
#include "linear.h"
#include "memory.h"
#include "rows.h"
#include "softmax.h"
#include "threads.h"

namespace metselect {
namespace {

template <typename T>
struct Decoder {
  Picked<T> h;
  const T* weight;  // [C, D]
  const T* bias;    // [C], null in selected_logits_backward
};

// The rows of one tile that one layer decodes: their positions among the picked rows, and their
// features, copied unless the rows are consecutive in the layer.
template <typename T>
struct Tile {
  std::vector<int64_t> place;
  std::vector<T> copy;
  const T* rows;
  int64_t stride;

  int64_t size() const { return static_cast<int64_t>(place.size()); }

  void read(const Picked<T>& h, bool consecutive) {
    if (consecutive && !h.rows && size() > 0) {
      rows = h[place[0]];
      stride = h.stride;
      return;
    }
    copy.resize(size() * h.width);
    for (int64_t i = 0; i < size(); ++i) std::copy_n(h[place[i]], h.width, &copy[i * h.width]);
    rows = copy.data();
    stride = h.width;
  }
};

// Calls body(depth, tile) for each layer and tile of the rows [begin, end).
template <typename T, typename Body>
void decoded_tiles(const std::vector<Decoder<T>>& decoders, const int64_t* layer, bool every_layer,
                   int64_t begin, int64_t end, const Body& body) {
  Tile<T> tile;
  for (int64_t start = begin; start < end; start += kTile) {
    for (size_t depth = 0; depth < decoders.size(); ++depth) {
      tile.place.clear();
      for (int64_t i = start; i < std::min(end, start + kTile); ++i) {
        if (every_layer || layer[i] == static_cast<int64_t>(depth)) tile.place.push_back(i);
      }
      tile.read(decoders[depth].h, every_layer);
      body(depth, tile);
    }
  }
}

template <typename T>
void decode(const Decoder<T>& decoder, const Tile<T>& tile, int64_t classes, T* a) {
  for (int64_t i = 0; i < tile.size(); ++i) std::copy_n(decoder.bias, classes, a + i * classes);
  gemm<T>(tile.size(), classes, decoder.h.width, {tile.rows, tile.stride},
          Matrix<const T>{decoder.weight, decoder.h.width}.t(), 1, {a, classes});
}

std::vector<Tensor> contiguous(TensorList tensors) {
  std::vector<Tensor> out;
  for (const Tensor& tensor : tensors) out.push_back(tensor.contiguous());
  return out;
}

template <typename T>
std::vector<Decoder<T>> decoders(const std::vector<Tensor>& layers, const Indices& index,
                                 const std::vector<Tensor>& weights,
                                 const std::vector<Tensor>& biases) {
  std::vector<Decoder<T>> out;
  for (size_t depth = 0; depth < layers.size(); ++depth) {
    out.push_back({Picked<T>(layers[depth], index.get(depth)), weights[depth].const_data_ptr<T>(),
                   biases.empty() ? nullptr : biases[depth].const_data_ptr<T>()});
  }
  return out;
}

int64_t check_decoders(TensorList layers, const Indices& index, TensorList weights,
                       const Tensor& layer) {
  const int64_t n = check_layers(layers, index, weights);
  check_numbers(layer, static_cast<int64_t>(layers.size()), "layer");
  TORCH_CHECK(layer.size(0) == n, "layer has ", layer.size(0), " entries for ", n, " rows");
  return n;
}

void check_biases(TensorList biases, TensorList weights) {
  TORCH_CHECK(biases.size() == weights.size(), "got ", biases.size(), " biases for ",
              weights.size(), " weights");
  for (const Tensor& bias : biases) {
    TORCH_CHECK(bias.dim() == 1 && bias.size(0) == weights[0].size(0) &&
                    bias.scalar_type() == weights[0].scalar_type(),
                "a bias is ", bias.scalar_type(), " of shape ", bias.sizes(), " for weights ",
                weights[0].scalar_type(), " of ", weights[0].size(0), " classes");
  }
}

Tensor selected_logits(TensorList layers, TensorList weights, TensorList biases,
                       const Tensor& layer, const Indices& index) {
  const int64_t n = check_decoders(layers, index, weights, layer);
  check_biases(biases, weights);
  const int64_t classes = weights[0].size(0);
  const std::vector<Tensor> h = unit_stride(layers), w = contiguous(weights),
                            b = contiguous(biases);
  Tensor logits = fresh({n, classes}, layers[0].options());
  AT_DISPATCH_FLOATING_TYPES(logits.scalar_type(), "selected_logits", [&] {
    const auto known = decoders<scalar_t>(h, index, w, b);
    scalar_t* out = logits.mutable_data_ptr<scalar_t>();
    over_shares(n, workers(n), [&](int64_t begin, int64_t end, int64_t) {
      std::vector<scalar_t> a(kTile * classes);
      decoded_tiles(known, layer.const_data_ptr<int64_t>(), false, begin, end,
                    [&](size_t depth, const Tile<scalar_t>& tile) {
                      decode(known[depth], tile, classes, a.data());
                      for (int64_t i = 0; i < tile.size(); ++i) {
                        std::copy_n(&a[i * classes], classes, out + tile.place[i] * classes);
                      }
                    });
    });
  });
  return logits;
}

struct Objective {
  const int64_t* layer;
  const int64_t* labels;
  double own;    // k of the selected layer
  double other;  // k of the others
};

// Buffers of one thread.
template <typename T>
struct Space {
  std::vector<T> logits, top, sum, rows;

  explicit Space(int64_t classes) : logits(kTile * classes), top(kTile), sum(kTile) {}
};

template <typename T>
METSELECT_CLONES void scale_rows(T* a, const T* scale, int64_t n, int64_t width) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t c = 0; c < width; ++c) a[i * width + c] *= scale[i];
  }
}

// Replaces the logits a by da = k (p - onehot) and returns sum_i k_i (-log p_y).
template <typename T>
double cross_entropy(const Tile<T>& tile, int64_t depth, int64_t classes,
                     const Objective& objective, Space<T>& space) {
  T* a = space.logits.data();
  double loss = 0;
  const auto weight = [&](int64_t at) {
    return objective.layer[at] == depth ? objective.own : objective.other;
  };
  for (int64_t i = 0; i < tile.size(); ++i) {
    loss -= weight(tile.place[i]) * a[i * classes + objective.labels[tile.place[i]]];
  }
  exponentials(a, tile.size(), classes, space.top.data(), space.sum.data());
  for (int64_t i = 0; i < tile.size(); ++i) {
    const double k = weight(tile.place[i]);
    loss += k * (space.top[i] + std::log(space.sum[i]));
    space.sum[i] = k / space.sum[i];
  }
  scale_rows(a, space.sum.data(), tile.size(), classes);
  for (int64_t i = 0; i < tile.size(); ++i) {
    a[i * classes + objective.labels[tile.place[i]]] -= weight(tile.place[i]);
  }
  return loss;
}

// Adds dW and db of a tile to `sums` and dh to `to_layer`.
template <typename T>
void backward(const Decoder<T>& decoder, const Tile<T>& tile, const T* da, LinearSums<T>& sums,
              std::vector<T>& buffer, T* to_layer) {
  const int64_t width = decoder.h.width, n = tile.size(), classes = sums.classes();
  sums.add({tile.rows, tile.stride}, da, n, width);
  if (!to_layer) return;
  buffer.resize(n * width);
  gemm<T>(n, width, classes, {da, classes}, {decoder.weight, width}, 0, {buffer.data(), width});
  for (int64_t i = 0; i < n; ++i) {
    add_rows(&buffer[i * width], decoder.h, tile.place[i], 1, to_layer);
  }
}

std::tuple<std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>> selected_logits_backward(
    const Tensor& grad, TensorList layers, TensorList weights, const Tensor& layer,
    const Indices& index) {
  const int64_t n = check_decoders(layers, index, weights, layer), classes = weights[0].size(0);
  TORCH_CHECK(grad.dim() == 2 && grad.size(0) == n && grad.size(1) == classes &&
                  grad.scalar_type() == layers[0].scalar_type(),
              "grad is ", grad.scalar_type(), " of shape ", grad.sizes());
  const std::vector<Tensor> h = unit_stride(layers), w = contiguous(weights);
  const Tensor g = grad.contiguous();
  std::vector<Tensor> to_layers, to_weights, to_biases;
  AT_DISPATCH_FLOATING_TYPES(g.scalar_type(), "selected_logits_backward", [&] {
    using T = scalar_t;
    const auto known = decoders<T>(h, index, w, {});
    int64_t shares = workers(n);
    std::vector<std::vector<LinearSums<T>>> sums;
    for (size_t depth = 0; depth < h.size(); ++depth) {
      if (has_duplicates(index.get(depth), h[depth].size(0))) shares = 1;
      to_layers.push_back(fresh_zeros(h[depth].sizes(), g.options()));
    }
    for (const auto& decoder : known) {
      sums.emplace_back(shares, LinearSums<T>(classes, decoder.h.width));
    }
    over_shares(n, shares, [&](int64_t begin, int64_t end, int64_t worker) {
      std::vector<T> da(kTile * classes), buffer;
      decoded_tiles(known, layer.const_data_ptr<int64_t>(), false, begin, end,
                    [&](size_t depth, const Tile<T>& tile) {
                      for (int64_t i = 0; i < tile.size(); ++i) {
                        std::copy_n(g.const_data_ptr<T>() + tile.place[i] * classes, classes,
                                    &da[i * classes]);
                      }
                      backward(known[depth], tile, da.data(), sums[depth][worker], buffer,
                               to_layers[depth].mutable_data_ptr<T>());
                    });
    });
    for (size_t depth = 0; depth < sums.size(); ++depth) {
      auto [dw, db] = total(sums[depth], known[depth].h.width, g);
      to_weights.push_back(dw);
      to_biases.push_back(db);
    }
  });
  return {to_layers, to_weights, to_biases};
}

// The inputs and outputs of one pass over all rows.
struct Pass {
  std::vector<Tensor> layers, weights, biases;
  const Indices& index;
  Objective objective;
  int64_t n, classes;
  bool deep, gradients, keep_logits;
  Tensor logits, loss;
  std::vector<Tensor> to_layers, to_weights, to_biases;

  // Allocates the gradients to layers, empty where not wanted. Returns the number of shares that
  // the rows can be divided into.
  int64_t allocate(const c10::List<bool>& wanted) {
    const auto options = logits.options();
    int64_t shares = workers(n);
    for (size_t depth = 0; gradients && depth < layers.size(); ++depth) {
      const Tensor& h = layers[depth];
      to_layers.push_back(wanted[depth] ? fresh_zeros(h.sizes(), options)
                                        : at::empty({0}, options));
      // two threads must not add to the same row
      if (wanted[depth] && has_duplicates(index.get(depth), h.size(0))) shares = 1;
    }
    return shares;
  }

  template <typename T>
  void run(int64_t shares) {
    const auto known = decoders<T>(layers, index, weights, biases);
    std::vector<double> losses(shares, 0);
    std::vector<std::vector<LinearSums<T>>> sums;  // [layer][thread]
    for (size_t depth = 0; gradients && depth < known.size(); ++depth) {
      sums.emplace_back(shares, LinearSums<T>(classes, known[depth].h.width));
    }
    over_shares(n, shares, [&](int64_t begin, int64_t end, int64_t worker) {
      losses[worker] = share_of_nodes(known, begin, end, worker, sums);
    });
    loss.fill_(n ? std::accumulate(losses.begin(), losses.end(), 0.0) : std::nan(""));
    for (size_t depth = 0; depth < sums.size(); ++depth) {
      auto [dw, db] = total(sums[depth], known[depth].h.width, logits);
      to_weights.push_back(dw);
      to_biases.push_back(db);
    }
  }

  // Returns the loss of rows [begin, end).
  template <typename T>
  double share_of_nodes(const std::vector<Decoder<T>>& known, int64_t begin, int64_t end,
                        int64_t worker, std::vector<std::vector<LinearSums<T>>>& sums) {
    Space<T> space(classes);
    T *a = space.logits.data(), *out = logits.mutable_data_ptr<T>();
    double sum = 0;
    const auto of_tile = [&](int64_t depth, const Tile<T>& tile) {
      decode(known[depth], tile, classes, a);
      for (int64_t i = 0; keep_logits && i < tile.size(); ++i) {
        if (objective.layer[tile.place[i]] != depth) continue;
        std::copy_n(a + i * classes, classes, out + tile.place[i] * classes);
      }
      sum += cross_entropy(tile, depth, classes, objective, space);
      if (!gradients) return;
      T* rows = to_layers[depth].numel() ? to_layers[depth].mutable_data_ptr<T>() : nullptr;
      backward(known[depth], tile, a, sums[depth][worker], space.rows, rows);
    };
    decoded_tiles(known, objective.layer, deep, begin, end, of_tile);
    return sum;
  }
};

std::tuple<Tensor, Tensor, std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>>
selected_cross_entropy(TensorList layers, TensorList weights, TensorList biases,
                       const Tensor& layer, const Tensor& labels, const Indices& index,
                       double deep_supervision, const c10::List<bool>& wanted, bool keep_logits) {
  const int64_t n = check_decoders(layers, index, weights, layer);
  check_biases(biases, weights);
  const int64_t classes = weights[0].size(0);
  check_labels(labels, n, classes);
  TORCH_CHECK(wanted.empty() || wanted.size() == layers.size(), "wanted has ", wanted.size(),
              " entries for ", layers.size(), " layers");
  const double rows = n, other = deep_supervision / (layers.size() * rows);
  Pass pass{
      unit_stride(layers),
      contiguous(weights),
      contiguous(biases),
      index,
      {layer.const_data_ptr<int64_t>(), labels.const_data_ptr<int64_t>(), 1 / rows + other, other},
      n,
      classes,
      deep_supervision != 0,
      !wanted.empty(),
      keep_logits,
      fresh({keep_logits ? n : 0, classes}, layers[0].options()),
      at::empty({}, layers[0].options())};
  const int64_t shares = pass.allocate(wanted);
  AT_DISPATCH_FLOATING_TYPES(pass.loss.scalar_type(), "selected_cross_entropy",
                             [&] { pass.run<scalar_t>(shares); });
  return {pass.loss, pass.logits, pass.to_layers, pass.to_weights, pass.to_biases};
}

}  // namespace

TORCH_LIBRARY_IMPL(metselect, CPU, m) {
  m.impl("selected_logits", &selected_logits);
  m.impl("selected_logits_backward", &selected_logits_backward);
  m.impl("selected_cross_entropy", &selected_cross_entropy);
}

}  // namespace metselect
