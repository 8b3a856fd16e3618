// How many partial results the kernel of merge_attention takes at once.
#pragma once

namespace archflash {

constexpr int MERGE_PARTS = 8;

}  // namespace archflash
