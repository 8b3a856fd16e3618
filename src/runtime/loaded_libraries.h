// Functions of shared libraries that this process has loaded already. What systems do in different
// ways is in loaded_libraries.cpp alone, and in _posix.py of the Python package.
#pragma once

namespace archflash {

// The library of PyTorch with this name ("torch_cpu"), or nullptr if it is not loaded.
void* loaded_library(const char* name);

// The address of an exported function, or nullptr.
void* exported(void* library, const char* function);

}  // namespace archflash
