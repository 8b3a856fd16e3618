#include "runtime/loaded_libraries.h"

#include <string>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace archflash {

#ifdef _WIN32

void* loaded_library(const char* name) {
  return reinterpret_cast<void*>(GetModuleHandleA((std::string(name) + ".dll").c_str()));
}

void* exported(void* library, const char* function) {
  return reinterpret_cast<void*>(GetProcAddress(reinterpret_cast<HMODULE>(library), function));
}

#else

void* loaded_library(const char* name) {
  return dlopen(("lib" + std::string(name) + ".so").c_str(), RTLD_LAZY | RTLD_NOLOAD);
}

void* exported(void* library, const char* function) { return dlsym(library, function); }

#endif

}  // namespace archflash
