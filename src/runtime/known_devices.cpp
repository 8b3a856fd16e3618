#include "runtime/known_devices.h"

#include <cctype>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace archflash {
namespace {

// The limits that all devices of a compute capability share. KB are 1024 bytes.
// Source: NVIDIA CCCL, libcudacxx cuda/__device/arch_traits.h, and cuda_occupancy.h of CUDA 13.0.
// From 8.0 on the driver keeps 1 KB of shared memory for each block.
struct Limits {
  int capability;
  int shared_per_block_kb;  // opt-in maximum
  int shared_per_sm_kb;
  int threads_per_sm;
};

// clang-format off
constexpr Limits LIMITS[] = {
    //      block    SM  threads
    { 75,      64,   64,    1024},
    { 80,     163,  164,    2048},
    { 86,      99,  100,    1536},
    { 87,     163,  164,    1536},
    { 89,      99,  100,    1536},
    { 90,     227,  228,    2048},
    {100,     227,  228,    2048},
    {103,     227,  228,    2048},
    {110,     227,  228,    1536},
    {120,      99,  100,    1536},
    {121,      99,  100,    1536},
};
// clang-format on
constexpr int REGISTERS_PER_SM = 65536;  // for 7.5 to 12.1, by the sources named above

struct Row {
  const char* name;
  int capability;
  int sm_count;
  int l2_kb;
  double boost_mhz, bandwidth_gbps, fp32_tflops, fp16_tflops, fp8_tflops;
  std::vector<std::string_view> aliases;
  std::vector<std::string_view> unconfirmed;
  const char* source;
};

// In a source, "fp16 82 x 512 x 1.695" says that the peak is derived: SMs x flop per clock x GHz.
// A data sheet or whitepaper may be known by who cites it: docs/lab/known-devices.md names both.
// clang-format off
const std::vector<Row>& rows() {
  static const std::vector<Row> table = {
      // name              cc  SMs   L2 KB   MHz   GB/s   fp32    fp16     fp8
      {"T4",               75,  40,   4096, 1590,   320,   8.1,   65.0,    0.0,
       {"Tesla T4", "NVIDIA T4"},
       {},
       "T4 datasheet; SMs, clock, L2: TechPowerUp"},
      {"A100",             80, 108,  40960, 1410,  2039,  19.5,  312.0,    0.0,
       {"NVIDIA A100-SXM4-80GB", "A100 80GB", "A100 SXM", "A100 SXM 80GB", "A100-80GB"},
       {},
       "A100 datasheet; the rest: OpenXLA a100_sxm_80"},
      {"RTX 3090",         86,  82,   6144, 1695,   936,  35.6,   71.2,    0.0,
       {"NVIDIA GeForce RTX 3090", "3090"},
       {},
       "TechPowerUp, Tom's Hardware; fp16 82 x 512 x 1.695 (half of the fp16-accumulate rate)"},
      {"A10G",             86,  80,   6144, 1710,   600,  35.0,   70.0,    0.0,
       {"NVIDIA A10G"},
       {"sm_count", "l2_bytes", "boost_mhz", "fp32_tflops"},
       "TensorRT-LLM cluster_info.py (600 GB/s, 70); 80 SMs and 1710 MHz give 70; L2 of the A10"},
      {"Jetson AGX Orin",  87,  16,   4096, 1300, 204.8,   5.3,   42.5,    0.0,
       {"Orin", "AGX Orin", "Jetson AGX Orin 64GB", "Jetson Orin"},
       {"boost_mhz", "bandwidth_gbps", "fp16_tflops"},
       "Jetson AGX Orin technical brief; fp16: 170 sparse INT8 TOPS / 4; clock: 5.3 TFLOP/s"},
      {"L4",               89,  58,  49152, 2040,   300,  30.3,  121.0,  242.0,
       {"NVIDIA L4"},
       {},
       "L4 datasheet (sparse peaks / 2); clock and L2: TechPowerUp; SMs: 7424 cores / 128"},
      {"L40S",             89, 142,  98304, 2520,   864,  91.6,  362.0,  733.0,
       {"NVIDIA L40S"},
       {"l2_bytes"},
       "L40S datasheet; clock: TechPowerUp; L2: the whole AD102, but TechPowerUp says 48 MB"},
      {"RTX 4090",         89, 128,  73728, 2520,  1008,  82.6,  165.2,  330.3,
       {"NVIDIA GeForce RTX 4090", "4090"},
       {},
       "Ada whitepaper; hmc-tech (L2, fp16 128 x 512 x 2.52, fp8 128 x 1024 x 2.52)"},
      {"H100",             90, 132,  51200, 1980,  3350,  66.9,  989.4, 1978.9,
       {"NVIDIA H100 80GB HBM3", "H100 SXM", "H100 SXM5", "H100 80GB", "H100-SXM5-80GB"},
       {},
       "H100 datasheet (sparse peaks / 2, stated at 1830 MHz); the rest: OpenXLA h100_sxm"},
      {"H200",             90, 132,  61440, 1980,  4800,  66.9,  989.4, 1978.9,
       {"NVIDIA H200", "H200 SXM", "H200 141GB", "NVIDIA H200 141GB HBM3e"},
       {},
       "H200 datasheet (sparse peaks / 2); L2: driver of an H200; clock: OpenXLA h200"},
      {"B200",            100, 148, 129536, 1965,  7672,  74.4, 2250.0, 4500.0,
       {"NVIDIA B200", "B200 SXM", "B200 SXM6"},
       {},
       "Blackwell datasheet (sparse peaks / 2); the rest: OpenXLA b200; fp32 148 x 256 x 1.965"},
      {"B300",            103, 148, 132352, 1965,  7928,  74.4, 2250.0, 4500.0,
       {"NVIDIA B300 SXM6 AC", "NVIDIA B300", "B300 SXM", "B300 SXM6", "Blackwell Ultra"},
       {"sm_count", "l2_bytes", "boost_mhz", "bandwidth_gbps", "fp32_tflops"},
       "HGX B300 datasheet (sparse peaks / 2); L2, GB/s: OpenXLA gb300; fp32 148 x 256 x 1.965"},
      {"Jetson Thor",     110,  20,  32768, 1575,   273,   8.1,  258.0,  517.0,
       {"NVIDIA Thor", "Thor", "Jetson AGX Thor", "Jetson T5000"},
       {"boost_mhz", "bandwidth_gbps", "fp32_tflops", "fp16_tflops", "fp8_tflops"},
       "SMs, L2: driver values, NVIDIA forum topic 356355; peaks: 2070 sparse FP4 / 8 and / 4"},
      {"RTX 5060 Laptop", 120,  26,  32768, 1890,   384,  12.6,   25.2,   50.3,
       {"NVIDIA GeForce RTX 5060 Laptop GPU", "RTX 5060 Mobile", "5060 Laptop"},
       {"boost_mhz", "fp32_tflops", "fp16_tflops", "fp8_tflops"},
       "TechPowerUp; clock and peaks: hmc-tech at 50 W (the laptop's power limit sets them)"},
      {"RTX 5080",        120,  84,  65536, 2617,   960,  56.3,  112.6,  225.1,
       {"NVIDIA GeForce RTX 5080", "5080"},
       {},
       "TechPowerUp; fp16 84 x 512 x 2.617, fp8 84 x 1024 x 2.617 (FP4 900.4 / 4 by hmc-tech)"},
      {"RTX 5090",        120, 170,  98304, 2407,  1792, 104.8,  209.5,  419.0,
       {"NVIDIA GeForce RTX 5090", "5090"},
       {},
       "RTX Blackwell whitepaper, as cited by torchao roofline_utils.py; L2 and clock: reviews"},
      {"RTX PRO 6000",    120, 188, 131072, 2617,  1792, 126.0,  503.8, 1007.6,
       {"NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell", "PRO 6000",
        "RTX PRO 6000 Workstation"},
       {},
       "OpenXLA rtx6000pro (SMs, L2, GB/s); clock and peaks: hmc-tech (188 x 1024 x 2.617)"},
      {"GB10",            121,  48,  24576, 2550,   273,  31.0,  125.0,  250.0,
       {"NVIDIA GB10", "DGX Spark"},
       {"boost_mhz", "fp16_tflops", "fp8_tflops"},
       "Hot Chips 2025 (31); Chips and Cheese (SMs, L2, clock); fp16, fp8: sparse FP4 / 8, / 4"},
  };
  return table;
}
// clang-format on

const Limits& limits_of(int capability) {
  for (const Limits& limits : LIMITS) {
    if (limits.capability == capability) return limits;
  }
  throw std::logic_error("known_devices.cpp: LIMITS has no row for capability " +
                         std::to_string(capability));
}

KnownDevice from_row(const Row& row) {
  const Limits& limits = limits_of(row.capability);
  KnownDevice known{};
  known.device.name = row.name;
  known.device.major = row.capability / 10;
  known.device.minor = row.capability % 10;
  known.device.sm_count = row.sm_count;
  known.device.shared_per_block = int64_t{1024} * limits.shared_per_block_kb;
  known.device.shared_per_sm = int64_t{1024} * limits.shared_per_sm_kb;
  known.device.l2_bytes = int64_t{1024} * row.l2_kb;
  known.device.registers_per_sm = REGISTERS_PER_SM;
  known.device.threads_per_sm = limits.threads_per_sm;
  known.aliases = row.aliases;
  known.boost_mhz = row.boost_mhz;
  known.bandwidth_gbps = row.bandwidth_gbps;
  known.fp32_tflops = row.fp32_tflops;
  known.fp16_tflops = row.fp16_tflops;
  known.fp8_tflops = row.fp8_tflops;
  known.unconfirmed = row.unconfirmed;
  known.source = row.source;
  return known;
}

// "NVIDIA GeForce RTX 4090" and "rtx-4090" both become "rtx4090".
std::string normalised(std::string_view name) {
  std::string letters;
  for (unsigned char c : name) {
    if (std::isalnum(c)) letters += static_cast<char>(std::tolower(c));
  }
  for (std::string_view prefix : {"nvidia", "geforce"}) {
    if (letters.starts_with(prefix)) letters.erase(0, prefix.size());
  }
  return letters;
}

}  // namespace

const std::vector<KnownDevice>& known_devices() {
  static const std::vector<KnownDevice> devices = [] {
    std::vector<KnownDevice> built;
    for (const Row& row : rows()) built.push_back(from_row(row));
    return built;
  }();
  return devices;
}

const KnownDevice* find_known_device(std::string_view name) {
  const std::string wanted = normalised(name);
  for (const KnownDevice& known : known_devices()) {
    if (normalised(known.device.name) == wanted) return &known;
    for (std::string_view alias : known.aliases) {
      if (normalised(alias) == wanted) return &known;
    }
  }
  return nullptr;
}

}  // namespace archflash
