// The functions of the CUDA driver that this crate calls, for one device of one multiprocessor at a time: work runs when it is put
// on a stream, and a graph is a list of it.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {

using u32 = unsigned;
using u64 = unsigned long long;
using Work = std::function<void()>;

struct Graph { std::vector<Work> work; };
struct Stream { Graph* capture = nullptr; };
struct Module { void* handle; };
struct Function {
  Work* (*bind)(void**);
  void (*run)(Work*, const u32*, u32, u32);
};
struct LaunchConfig {
  u32 grid[3], block[3], shared;
  Stream* stream;
  void* attributes;
  u32 count;
};

std::recursive_mutex one_at_a_time;
std::map<u64, std::pair<void*, size_t>> memory;
int context;
thread_local void* current = nullptr;

int put(Stream* stream, Work work) {
  if (reinterpret_cast<uintptr_t>(stream) > 16 && stream->capture) return stream->capture->work.push_back(std::move(work)), 0;
  std::lock_guard lock(one_at_a_time);
  return work(), 0;
}

}  // namespace

extern "C" {

int cuInit(u32) { return 0; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuGetErrorString(int, const char** text) { return *text = "the simulator refuses", 0; }
int cuGetErrorName(int, const char** text) { return *text = "SIMULATOR", 0; }
int cuDeviceGetCount(int* count) { return *count = 1, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetName(char* name, int size, int) { return snprintf(name, size, "simulator"), 0; }
int cuDeviceGetUuid_v2(char* uuid, int) { return memset(uuid, 0, 16), 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = 8ull << 30, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case 75: return *value = 9, 0;           // compute capability
    case 76: return *value = 0, 0;
    case 16: return *value = getenv("SIGMASCALE_SIMULATOR_PROCESSORS") ? atoi(getenv("SIGMASCALE_SIMULATOR_PROCESSORS")) : 4, 0;
    case 97: return *value = 232448, 0;      // shared memory of a block
    default: return *value = 0, 0;
  }
}
int cuDevicePrimaryCtxRetain(void** to, int) { return *to = &context, 0; }
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxSetCurrent(void* to) { return current = to, 0; }
int cuCtxGetCurrent(void** to) { return *to = current, 0; }
int cuCtxSynchronize() { return 0; }
int cuCtxGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -1, 0; }
int cuThreadExchangeStreamCaptureMode(int*) { return 0; }

// An allocation ends at a page that cannot be touched.
int cuMemAlloc_v2(u64* to, size_t bytes) {
  std::lock_guard lock(one_at_a_time);
  const size_t page = 4096, room = (bytes + 255) / 256 * 256, whole = (room + page - 1) / page * page;
  char* base = (char*)mmap(nullptr, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return 2;
  mprotect(base + whole, page, PROT_NONE);
  memset(base, 0xff, whole);
  *to = (u64)(base + whole - room);
  memory[*to] = {base, whole + page};
  return 0;
}
int cuMemFree_v2(u64 at) {
  std::lock_guard lock(one_at_a_time);
  const auto found = memory.find(at);
  if (found == memory.end()) return 1;
  munmap(found->second.first, found->second.second);
  return memory.erase(found), 0;
}
int cuMemGetInfo_v2(size_t* free, size_t* total) { return *free = *total = 8ull << 30, 0; }
int cuMemcpyHtoDAsync_v2(u64 to, const void* from, size_t bytes, Stream* stream) { return put(stream, [=] { memcpy((void*)to, from, bytes); }); }
int cuMemcpyDtoHAsync_v2(void* to, u64 from, size_t bytes, Stream* stream) { return put(stream, [=] { memcpy(to, (void*)from, bytes); }); }
int cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t bytes, Stream* stream) { return put(stream, [=] { memcpy((void*)to, (void*)from, bytes); }); }
int cuMemsetD8Async(u64 to, unsigned char value, size_t bytes, Stream* stream) { return put(stream, [=] { memset((void*)to, value, bytes); }); }

int cuStreamCreate(Stream** stream, u32) { return *stream = new Stream, 0; }
int cuStreamCreateWithPriority(Stream** stream, u32, int) { return *stream = new Stream, 0; }
int cuStreamDestroy_v2(Stream* stream) { return delete stream, 0; }
int cuStreamSynchronize(Stream*) { return 0; }
int cuStreamIsCapturing(Stream* stream, int* status) { return *status = stream && stream->capture, 0; }
int cuStreamBeginCapture_v2(Stream* stream, int) { return stream->capture = new Graph, 0; }
int cuStreamEndCapture(Stream* stream, Graph** graph) { return *graph = stream->capture, stream->capture = nullptr, 0; }
int cuStreamWaitEvent(Stream*, void*, u32) { return 0; }
int cuGraphInstantiateWithFlags(Graph** exec, Graph* graph, u64) { return *exec = graph, 0; }
int cuGraphUpload(Graph*, Stream*) { return 0; }
int cuGraphLaunch(Graph* graph, Stream*) {
  std::lock_guard lock(one_at_a_time);
  for (Work& work : graph->work) work();
  return 0;
}
int cuGraphDestroy(Graph* graph) { return delete graph, 0; }
int cuGraphExecDestroy(Graph*) { return 0; }
int cuEventCreate(void** event, u32) { return *event = new char, 0; }
int cuEventRecord(void*, Stream*) { return 0; }
int cuEventSynchronize(void*) { return 0; }
int cuEventElapsedTime_v2(float* time, void*, void*) { return *time = 0, 0; }
int cuEventDestroy_v2(char* event) { return delete event, 0; }

int cuModuleLoadData(Module** module, const char* image) {
  u64 size;
  memcpy(&size, image, 8);
  char path[] = "/tmp/simulator-XXXXXX";
  const int file = mkstemp(path);
  if (file < 0 || write(file, image + 8, size) != (ssize_t)size) return 2;
  close(file);
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  unlink(path);
  if (!handle) return fprintf(stderr, "simulator: %s\n", dlerror()), 200;
  return *module = new Module{handle}, 0;
}
int cuModuleUnload(Module* module) { return delete module, 0; }
int cuModuleGetFunction(Function** function, Module* module, const char* name) {
  void* bind = dlsym(module->handle, ("simulator_bind_" + std::string(name)).c_str());
  if (!bind) return 500;
  return *function = new Function{(Work * (*)(void**)) bind, (void (*)(Work*, const u32*, u32, u32))dlsym(module->handle, "simulator_run")}, 0;
}
int cuModuleGetGlobal_v2(u64* at, size_t* bytes, Module* module, const char* name) {
  void* found = dlsym(module->handle, name);
  return found ? (*at = (u64)found, *bytes = 4, 0) : 500;
}
int cuFuncSetAttribute(Function*, int, int) { return 0; }
int cuFuncGetAttribute(int* value, int, Function*) { return *value = 0, 0; }

int cuLaunchKernelEx(const LaunchConfig* config, Function* function, void** parameters, void**) {
  const LaunchConfig c = *config;
  if (c.block[0] == 0 || c.block[0] > 1024 || c.grid[0] == 0 || c.grid[1] == 0 || c.grid[2] == 0 || c.grid[1] > 65535 || c.grid[2] > 65535) return 1;
  std::shared_ptr<Work> kernel(function->bind(parameters));
  return put(c.stream, [=] { function->run(kernel.get(), c.grid, c.block[0], c.shared); });
}

// As include/ptx/tma.cuh reads it.
int cuTensorMapEncodeTiled(u64* map, int element, u32 rank, void* address, const u64* extents, const u64* strides, const u32* box, const u32*, int, int swizzle, int, int) {
  const int sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  if (rank < 1 || rank > 5 || (u64)address % 16 != 0) return 1;
  memset(map, 0, 128);
  map[0] = (u64)address, map[1] = sizes[element] | rank << 8 | (u64)swizzle << 16;
  u64 inner = sizes[element] * box[0];
  const u64 spans[] = {~0ull, 32, 64, 128};
  if (inner % 16 != 0 || inner > spans[swizzle]) return 1;
  for (u32 i = 0; i < rank; i++) {
    if (extents[i] == 0 || extents[i] > 1ull << 32 || box[i] == 0 || box[i] > 256) return 1;
    if (i > 0 && (strides[i - 1] % 16 != 0 || strides[i - 1] >= 1ull << 40)) return 1;
    map[2 + i] = extents[i];
    if (i > 0) map[6 + i] = strides[i - 1];
  }
  memcpy(map + 11, box, 4 * rank);
  return 0;
}

}  // extern "C"
