// Prints the descriptors that CUTLASS's headers make: a line "name value" for each. Needs no GPU.

// clang-format off
#include <cute/tensor.hpp>  // what the others count on
// clang-format on
#include <cstdint>
#include <cstdio>
#include <cute/atom/mma_traits_sm100.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <type_traits>

namespace {

using Element = cute::bfloat16_t;
constexpr auto K = cute::UMMA::Major::K;
constexpr auto MN = cute::UMMA::Major::MN;

// A matrix of ROWS x DEPTH elements made of an atom's layout, at address 0: atoms along the rows
// follow one another, or those along the depth.
template <int ROWS, int DEPTH, bool ROWS_FIRST, class Atom>
auto tile(Atom atom) {
  using Order = std::conditional_t<ROWS_FIRST, cute::Step<cute::_1, cute::_2>,
                                   cute::Step<cute::_2, cute::_1>>;
  const auto layout =
      cute::tile_to_shape(atom, cute::Shape<cute::Int<ROWS>, cute::Int<DEPTH>>{}, Order{});
  return cute::make_tensor(cute::make_smem_ptr(static_cast<Element*>(nullptr)), layout);
}

template <cute::UMMA::Major MAJOR, int ROWS, int DEPTH, class Atom>
void tcgen05(const char* name, Atom atom) {
  const auto bits =
      static_cast<uint64_t>(cute::UMMA::make_umma_desc<MAJOR>(tile<ROWS, DEPTH, MAJOR == K>(atom)));
  std::printf("tcgen05-%s %llu\n", name, static_cast<unsigned long long>(bits));
}

template <cute::GMMA::Major MAJOR, int ROWS, int DEPTH, class Atom>
void wgmma(const char* name, Atom atom) {
  // What one instruction takes.
  const auto step =
      cute::local_tile(tile<ROWS, DEPTH, true>(atom), cute::Shape<cute::Int<ROWS>, cute::_16>{},
                       cute::make_coord(0, 0));
  const auto bits = static_cast<uint64_t>(cute::SM90::GMMA::make_gmma_desc<MAJOR>(step));
  std::printf("wgmma-%s %llu\n", name, static_cast<unsigned long long>(bits));
}

template <class A, class B, class D, int M, int N, cute::UMMA::Major A_MAJOR = K,
          cute::UMMA::Major B_MAJOR = K>
void instruction(const char* name) {
  constexpr auto made = cute::UMMA::make_instr_desc<A, B, D, M, N, A_MAJOR, B_MAJOR>();
  std::printf("instruction-%s %u\n", name, static_cast<unsigned>(static_cast<uint32_t>(made)));
}

}  // namespace

int main() {
  tcgen05<K, 128, 64>("k-128", cute::UMMA::Layout_K_SW128_Atom<Element>{});
  tcgen05<K, 128, 32>("k-64", cute::UMMA::Layout_K_SW64_Atom<Element>{});
  tcgen05<K, 128, 16>("k-32", cute::UMMA::Layout_K_SW32_Atom<Element>{});
  tcgen05<K, 128, 64>("k-0", cute::UMMA::Layout_K_INTER_Atom<Element>{});
  tcgen05<MN, 64, 128>("mn-128-one-slab", cute::UMMA::Layout_MN_SW128_Atom<Element>{});
  tcgen05<MN, 128, 64>("mn-128-slabs", cute::UMMA::Layout_MN_SW128_Atom<Element>{});
  tcgen05<MN, 128, 128>("mn-64-slabs", cute::UMMA::Layout_MN_SW64_Atom<Element>{});
  tcgen05<MN, 128, 128>("mn-32-slabs", cute::UMMA::Layout_MN_SW32_Atom<Element>{});
  // The tiles of blackwell_dc: a slab of K (those of Q are above), V.
  const auto mn_128 = cute::UMMA::Layout_MN_SW128_Atom<Element>{};
  tcgen05<K, 64, 64>("dc-k-64x64", cute::UMMA::Layout_K_SW128_Atom<Element>{});
  tcgen05<MN, 64, 128>("dc-v-128x64", mn_128);
  tcgen05<MN, 96, 128>("dc-v-128x96", cute::UMMA::Layout_MN_SW64_Atom<Element>{});
  tcgen05<MN, 128, 128>("dc-v-128x128", mn_128);
  tcgen05<MN, 256, 64>("dc-v-64x256", mn_128);
  wgmma<cute::GMMA::Major::K, 64, 64>("k-128", cute::GMMA::Layout_K_SW128_Atom<Element>{});
  wgmma<cute::GMMA::Major::K, 64, 32>("k-64", cute::GMMA::Layout_K_SW64_Atom<Element>{});
  wgmma<cute::GMMA::Major::K, 64, 16>("k-32", cute::GMMA::Layout_K_SW32_Atom<Element>{});
  using Half = cute::half_t;
  using E4M3 = cute::float_e4m3_t;
  using E5M2 = cute::float_e5m2_t;
  using TF32 = cute::tfloat32_t;
  instruction<Element, Element, float, 128, 64>("bf16-128-64-k-k");
  instruction<Element, Element, float, 128, 256, K, MN>("bf16-128-256-k-mn");
  instruction<Element, Element, float, 64, 128, MN, MN>("bf16-64-128-mn-mn");
  instruction<Element, Element, float, 256, 128, K, MN>("bf16-256-128-k-mn");
  instruction<Element, Element, float, 128, 128>("dc-bf16-s-128");
  instruction<Half, Half, float, 128, 128>("dc-f16-s-128");
  instruction<Element, Element, float, 256, 128>("dc-bf16-s-pair");
  instruction<Half, Half, float, 256, 128>("dc-f16-s-pair");
  instruction<Element, Element, float, 128, 64>("dc-bf16-s-64");
  instruction<Half, Half, float, 128, 64>("dc-f16-s-64");
  instruction<Element, Element, float, 128, 64, K, MN>("dc-bf16-o-64");
  instruction<Half, Half, float, 128, 64, K, MN>("dc-f16-o-64");
  instruction<Element, Element, float, 128, 96, K, MN>("dc-bf16-o-96");
  instruction<Half, Half, float, 128, 96, K, MN>("dc-f16-o-96");
  instruction<Element, Element, float, 128, 128, K, MN>("dc-bf16-o-128");
  instruction<Half, Half, float, 128, 128, K, MN>("dc-f16-o-128");
  instruction<Element, Element, float, 128, 256, K, MN>("dc-bf16-o-256");
  instruction<Half, Half, float, 128, 256, K, MN>("dc-f16-o-256");
  instruction<Element, Element, float, 256, 128, K, MN>("dc-bf16-o-pair");
  instruction<Half, Half, float, 256, 128, K, MN>("dc-f16-o-pair");
  instruction<Half, Half, Half, 128, 128>("f16-f16-128-128-k-k");
  instruction<TF32, TF32, float, 128, 128>("tf32-128-128-k-k");
  instruction<E5M2, E4M3, float, 128, 128>("e5m2-e4m3-128-128-k-k");
}
