// What a program that CuTe DSL compiled calls of CUDA, recorded instead of done; loaded by
// LD_PRELOAD. A launch becomes a line in the file that RECORD names, with the parameters as long as
// SIZES says ("8,128,4"). Every launch succeeds; no device is there.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CLUSTER = 4, SM_COUNT = 16, MAJOR = 75, MINOR = 76, SHARED_OPTIN = 97 };

// As cudaLaunchConfig_t and cudaLaunchAttribute are laid out.
typedef struct {
  unsigned id, pad;
  union {
    unsigned dims[3];
    char bytes[64];
  } value;
} Attribute;
typedef struct {
  unsigned grid[3], block[3];
  size_t shared_bytes;
  void* stream;
  const Attribute* attributes;
  unsigned attribute_count;
} Config;

int _cudaLibraryLoadData(void** library, const void* code, void* a, void* b, unsigned n, void* c,
                         void* d, unsigned m) {
  *library = (void*)code;
  return 0;
}
int _cudaLibraryUnload(void* library) { return 0; }
int _cudaLibraryGetKernel(void** kernel, void* library, const char* name) {
  *kernel = strdup(name);
  return 0;
}
int _cudaFuncSetAttribute(const void* kernel, int attribute, int value) { return 0; }
int _cudaKernelSetAttributeForDevice(void* kernel, int attribute, int value, int device) {
  return 0;
}
int _cuKernelGetAttribute(int* value, int attribute, void* kernel, int device) {
  *value = 0;
  return 0;
}
int _cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}
int _cudaGetDeviceCount(int* count) {
  *count = 1;
  return 0;
}
int _cuDeviceGet(int* device, int index) {
  *device = 0;
  return 0;
}
int _cudaDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) {  // of a B200
    case SM_COUNT:
      *value = 148;
      return 0;
    case MAJOR:
      *value = 10;
      return 0;
    case MINOR:
      *value = 0;
      return 0;
    case SHARED_OPTIN:
      *value = 232448;
      return 0;
    default:
      return 1;  // cudaErrorInvalidValue
  }
}
int _cudaLaunchKernelEx(const Config* config, const void* kernel, void** arguments) {
  FILE* record = fopen(getenv("RECORD"), "a");
  unsigned cluster[3] = {1, 1, 1};
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    if (config->attributes[i].id == CLUSTER) {
      memcpy(cluster, config->attributes[i].value.dims, sizeof cluster);
    }
  }
  fprintf(record, "{\"kernel\": \"%s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], ",
          (const char*)kernel, config->grid[0], config->grid[1], config->grid[2], config->block[0],
          config->block[1], config->block[2]);
  fprintf(record, "\"cluster\": [%u, %u, %u], \"shared\": %zu, \"parameters\": [", cluster[0],
          cluster[1], cluster[2], config->shared_bytes);
  const char* size = getenv("SIZES");
  for (int i = 0; *size != '\0'; ++i) {
    char* end;
    const long bytes = strtol(size, &end, 10);
    fprintf(record, "%s\"", i > 0 ? ", " : "");
    for (long k = 0; k < bytes; ++k) fprintf(record, "%02x", ((const uint8_t*)arguments[i])[k]);
    fprintf(record, "\"");
    size = *end == ',' ? end + 1 : end;
  }
  fprintf(record, "]}\n");
  fclose(record);
  return 0;
}
