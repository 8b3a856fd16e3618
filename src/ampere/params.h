// The one parameter of every ampere kernel.
#pragma once

#include "common/attention_params.h"

namespace archflash::ampere {

using Params = AttentionParams;

}  // namespace archflash::ampere
