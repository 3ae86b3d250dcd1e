// SPDX-License-Identifier: Apache-2.0
//
// The scan by Highway, compiled once per instruction set. The choice among the variants is the
// caller's (ScanVariantFor), not Highway's global dispatch, so that two engines of one process may
// use different ones.
//
// Blocks of 64 entries. AVX-512 appends by register compression; elsewhere a bit loop over the
// block's mask appends: Compress of Highway 1.0.3 with g++ is 20 times slower on AVX2, because it
// copies its table at every call.
#include "kernels/cpu/scan.h"

// Only instruction sets that pay: SSE and the baseline are served by the scalar variant.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/scan_simd.cc"  // from the root of the tree
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>  // IWYU pragma: keep; must come before highway.h
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace bitopk::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr std::size_t kBlock = 64;

// Variants of the loop; each combination is a function of its own, so that no operand is tested
// inside it.
enum Operands { kMemoryAndGradient, kMemoryOnly, kGradientOnly };
enum Output { kNoOutput, kCached, kStreamed };

template <Operands kOperands>
HWY_INLINE float CorrectedEntry(const ScanTask& task, std::size_t i) {
  if constexpr (kOperands == kGradientOnly) return task.gradient[i];
  const float scaled = task.memory[i] * task.factor;
  if constexpr (kOperands == kMemoryOnly) return scaled + 0.0F;
  return scaled + task.gradient[i];
}

// One entry at a time: before the first aligned entry, and after the last whole block.
template <Operands kOperands, Output kOutput>
void ScanTail(const ScanTask& task, std::size_t end, ScanResult& result) {
  const std::int32_t high = kOutput == kNoOutput ? task.high : kKeyMask;
  for (; result.consumed < end && result.appended < task.room; ++result.consumed) {
    const float a = CorrectedEntry<kOperands>(task, result.consumed);
    std::int32_t key;
    hwy::CopyBytes<sizeof key>(&a, &key);
    key &= kKeyMask;
    const bool candidate = key > task.low && key <= high;
    if (candidate) {
      task.indices[result.appended] =
          task.first_index + static_cast<std::uint32_t>(result.consumed);
      task.values[result.appended] = a;
      ++result.appended;
    }
    if constexpr (kOutput != kNoOutput) task.corrected[result.consumed] = candidate ? 0.0F : a;
  }
}

template <Operands kOperands, class D>
HWY_INLINE hn::VFromD<D> CorrectedVector(D d, const ScanTask& task, hn::VFromD<D> factor,
                                         std::size_t i) {
  if constexpr (kOperands == kGradientOnly) return hn::LoadU(d, task.gradient + i);
  const auto scaled = hn::Mul(hn::LoadU(d, task.memory + i), factor);
  if constexpr (kOperands == kMemoryOnly) return hn::Add(scaled, hn::Zero(d));
  return hn::Add(scaled, hn::LoadU(d, task.gradient + i));
}

// kCompress: append by register compression (needs a native compress); else by a bit loop.
// kBranch: skip the appending where a block has no candidate; pays when candidates are rare.
template <Operands kOperands, Output kOutput, bool kCompress, bool kBranch>
HWY_NOINLINE ScanResult ScanLoop(const ScanTask& task) {
  const hn::CappedTag<float, 16> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::RebindToUnsigned<decltype(d)> du;
  const std::size_t lanes = hn::Lanes(d);
  const auto factor = hn::Set(d, task.factor);
  const auto key_mask = hn::Set(di, kKeyMask);
  const auto low = hn::Set(di, task.low);
  const auto high = hn::Set(di, task.high);
  std::uint32_t* const indices = task.indices;
  float* const values = task.values;

  ScanResult result;
  if constexpr (kOutput != kNoOutput) {
    const auto misaligned = (reinterpret_cast<std::uintptr_t>(task.corrected) / sizeof(float)) % 16;
    const std::size_t peel = misaligned == 0 ? 0 : 16 - misaligned;
    ScanTail<kOperands, kOutput>(task, HWY_MIN(peel, task.num_entries), result);
    if (result.consumed < HWY_MIN(peel, task.num_entries)) return result;
  }
  std::size_t i = result.consumed;
  std::size_t n = result.appended;
  for (; i + kBlock <= task.num_entries && n < task.room; i += kBlock) {
    std::uint8_t mask_bytes[kBlock / 8] = {};
    for (std::size_t j = 0; j < kBlock; j += lanes) {
      const auto a = CorrectedVector<kOperands>(d, task, factor, i + j);
      const auto key = hn::And(hn::BitCast(di, a), key_mask);
      auto candidate = hn::Gt(key, low);
      if constexpr (kOutput == kNoOutput) candidate = hn::AndNot(hn::Gt(key, high), candidate);
      const auto mask = hn::RebindMask(d, candidate);
      if constexpr (kOutput == kCached) {
        hn::Store(hn::IfThenZeroElse(mask, a), d, task.corrected + i + j);
      } else if constexpr (kOutput == kStreamed) {
        hn::Stream(hn::IfThenZeroElse(mask, a), d, task.corrected + i + j);
      }
      if constexpr (kCompress && !kBranch) {
        const auto first = hn::Set(du, task.first_index + static_cast<std::uint32_t>(i + j));
        hn::StoreU(hn::Compress(hn::Add(hn::Iota(du, 0), first), hn::RebindMask(du, candidate)), du,
                   indices + n);
        hn::StoreU(hn::Compress(a, mask), d, values + n);
        n += hn::CountTrue(d, mask);
      } else {
        hn::StoreMaskBits(d, mask, mask_bytes + j / 8);
      }
    }
    if constexpr (!kCompress || kBranch) {
      std::uint64_t bits;
      hwy::CopyBytes<sizeof bits>(mask_bytes, &bits);
      while (bits != 0) {
        const std::size_t at = i + hwy::Num0BitsBelowLS1Bit_Nonzero64(bits);
        bits &= bits - 1;
        indices[n] = task.first_index + static_cast<std::uint32_t>(at);
        values[n] = CorrectedEntry<kOperands>(task, at);
        ++n;
      }
    }
  }
  result.consumed = i;
  result.appended = n;
  ScanTail<kOperands, kOutput>(task, task.num_entries, result);
  if constexpr (kOutput == kStreamed) hwy::FlushStream();
  return result;
}

template <Operands kOperands, Output kOutput>
ScanResult ScanFor(const ScanTask& task) {
#if HWY_TARGET == HWY_AVX3
  // Stores that go around the caches suffer from the many overlapping stores of the compressed
  // vectors: 1.6 instead of 1.26 of `r += g` at a density of 0.01 in DRAM.
  if (!task.expect_few && kOutput != kStreamed)
    return ScanLoop<kOperands, kOutput, true, false>(task);
#endif
  return ScanLoop<kOperands, kOutput, false, true>(task);
}

template <Output kOutput>
ScanResult ScanOperands(const ScanTask& task) {
  if (task.memory == nullptr) return ScanFor<kGradientOnly, kOutput>(task);
  if (task.gradient == nullptr) return ScanFor<kMemoryOnly, kOutput>(task);
  return ScanFor<kMemoryAndGradient, kOutput>(task);
}

ScanResult Scan(const ScanTask& task) {
  if (task.corrected == nullptr) return ScanOperands<kNoOutput>(task);
  // In place, the bit loop must not read back what it has just zeroed: take the plain loop.
  if (task.corrected == task.gradient) {
    ScanResult result;
    ScanTail<kGradientOnly, kCached>(task, task.num_entries, result);
    return result;
  }
  return task.stream ? ScanOperands<kStreamed>(task) : ScanOperands<kCached>(task);
}

const char* CompiledFor() { return hwy::TargetName(HWY_TARGET); }

}  // namespace bitopk::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace bitopk::kernels {

const ScanVariant& ScanVariantFor(Isa isa) {
#if HWY_TARGETS & HWY_AVX2
  static const ScanVariant avx2 = {Isa::kAvx2, N_AVX2::CompiledFor(), &N_AVX2::Scan};
  if (isa == Isa::kAvx2) return avx2;
#endif
#if HWY_TARGETS & HWY_AVX3
  static const ScanVariant avx512 = {Isa::kAvx512, N_AVX3::CompiledFor(), &N_AVX3::Scan};
  if (isa == Isa::kAvx512) return avx512;
#endif
#if HWY_TARGETS & HWY_NEON
  static const ScanVariant neon = {Isa::kNeon, N_NEON::CompiledFor(), &N_NEON::Scan};
  if (isa == Isa::kNeon) return neon;
#endif
  return kScalarScan;
}

std::vector<Isa> SupportedIsas() {
  std::vector<Isa> isas = {Isa::kScalar};
  const auto supported = hwy::SupportedTargets();
  (void)supported;
#if HWY_TARGETS & HWY_NEON
  if ((supported & HWY_NEON) != 0) isas.push_back(Isa::kNeon);
#endif
#if HWY_TARGETS & HWY_AVX2
  if ((supported & HWY_AVX2) != 0) isas.push_back(Isa::kAvx2);
#endif
#if HWY_TARGETS & HWY_AVX3
  if ((supported & HWY_AVX3) != 0) isas.push_back(Isa::kAvx512);
#endif
  return isas;
}

}  // namespace bitopk::kernels
#endif  // HWY_ONCE
