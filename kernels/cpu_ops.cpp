// The engine's operators on a CPU: what medusa_core/ops.py defines in Python, without the Python in between.
//
// A decode step calls them some 180 times; each call from Python's own implementations costs tens of microseconds,
// several milliseconds a step. The operators' meaning and their schemas are in ops.py, whose implementations the tests
// compare these with. Legend as there: L layers, R cache rows, B rows, N nodes, S slots, H heads, D head size, G queries per key.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/library.h>

#include <cstring>

namespace {

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  using Scalars = c10::List<std::optional<at::Scalar>>;
  using Product = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, std::string_view,
                             Scalars, std::optional<std::string_view>);
  static const auto product =
      c10::Dispatcher::singleton().findSchemaOrThrow("mkldnn::_linear_pointwise", "").typed<Product>();
  return product.call(x, weight, bias, "none", Scalars(), "");
}

// new_BHND into slots start_B[b] .. start_B[b] + N - 1 of rows row .. row + B - 1 of one layer; D is contiguous in both.
void store(const at::Tensor& cache_LRHSD, const at::Tensor& new_BHND, int64_t layer, int64_t row,
           const int64_t* start_B) {
  const at::Tensor added = new_BHND.stride(3) == 1 ? new_BHND : new_BHND.contiguous();
  const int64_t batch = added.size(0), heads = added.size(1), nodes = added.size(2);
  const int64_t element = added.element_size(), bytes = added.size(3) * element;
  TORCH_CHECK(layer >= 0 && layer < cache_LRHSD.size(0) && row >= 0 && row + batch <= cache_LRHSD.size(1) &&
                  heads == cache_LRHSD.size(2) && added.size(3) == cache_LRHSD.size(4) &&
                  added.scalar_type() == cache_LRHSD.scalar_type() && cache_LRHSD.is_contiguous(),
              "the new keys don't fit the cache");
  char* target = static_cast<char*>(cache_LRHSD.data_ptr());
  const char* source = static_cast<const char*>(added.data_ptr());
  for (int64_t b = 0; b < batch; ++b) {
    TORCH_CHECK(start_B[b] >= 0 && start_B[b] + nodes <= cache_LRHSD.size(3), "a step past the cache's last slot");
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t to = layer * cache_LRHSD.stride(0) + (row + b) * cache_LRHSD.stride(1) +
                         h * cache_LRHSD.stride(2) + start_B[b] * cache_LRHSD.stride(3);
      const int64_t from = b * added.stride(0) + h * added.stride(1);
      for (int64_t n = 0; n < nodes; ++n)
        std::memcpy(target + to * element + n * bytes, source + (from + n * added.stride(2)) * element, bytes);
    }
  }
}

void write_cache(const at::Tensor& keys, const at::Tensor& values, const at::Tensor& key, const at::Tensor& value,
                 int64_t layer, int64_t row, const at::Tensor& start) {
  TORCH_CHECK(start.is_contiguous() && start.numel() >= key.size(0), "a start for every row");
  const int64_t* start_B = start.const_data_ptr<int64_t>();
  store(keys, key, layer, row, start_B);
  store(values, value, layer, row, start_B);
}

at::Tensor tree_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const at::Tensor& mask, std::optional<double> scale) {
  const int64_t batch = query.size(0), heads = query.size(1), nodes = query.size(2), size = query.size(3);
  const int64_t key_heads = key.size(1), slots = mask.size(3), group = heads / key_heads;
  const auto seen = [&](const at::Tensor& whole) { return whole.narrow(0, 0, batch).narrow(2, 0, slots); };
  const auto folded = mask.size(2) == group * nodes
                          ? mask
                          : mask.expand({batch, 1, nodes, slots}).repeat({1, 1, group, 1});
  const auto out = at::scaled_dot_product_attention(query.reshape({batch, key_heads, group * nodes, size}), seen(key),
                                                    seen(value), folded, 0.0, false, scale);
  return out.reshape({batch, heads, nodes, value.size(3)}).transpose(1, 2).contiguous();
}

}  // namespace

TORCH_LIBRARY_IMPL(medusa, CPU, library) {
  library.impl("packed_linear", packed_linear);
  library.impl("write_cache", write_cache);
  library.impl("tree_attention", tree_attention);
}

// Reordered weights are tensors of a backend of their own.
TORCH_LIBRARY_IMPL(medusa, MkldnnCPU, library) { library.impl("packed_linear", packed_linear); }
