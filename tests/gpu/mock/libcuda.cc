// A CUDA driver without a GPU: what cudarc and kvgate call of libcuda, for tests.
//
// Device memory is host memory between guard pages, poisoned, and there only when the stream that allocates it has got
// so far. Nothing that is given to a stream runs before it must or may: an operation waits in its stream until
// something needs it (lazy), or until chance takes it (permuted: with a seed, streams go ahead of each other as far as
// their waits let them). So an order that is not asked for does not happen, and a forgotten wait shows. Copies from
// memory that is not registered behave as the driver says: the source is read before the call returns.
//
// Tests steer it by the mock_* functions at the end. All of it runs under one lock, in the caller's thread.
#include <fcntl.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

typedef int Result;
typedef uint64_t Address;
typedef uint32_t u32;
typedef unsigned long long u64;

enum : Result {
  OK = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  NOT_FOUND = 500,
  NOT_READY = 600,
  ILLEGAL_ADDRESS = 700,
  ALREADY_REGISTERED = 712,
  NOT_REGISTERED = 713,
};

extern "C" bool run_kernel(const char* name, u32 blocks, u32 threads, const void* params, u64 seed);

#define API extern "C" __attribute__((visibility("default")))

namespace {

// ---------------------------------------------------------------- streams and events

struct Stream;

struct Event {
  Stream* stream = nullptr;
  u64 position = 0;  // of its latest record, in the stream
};

struct Operation {
  std::function<void()> run;
  // What it waits for.
  Stream* after = nullptr;
  u64 position = 0;
};

struct Stream {
  std::deque<Operation> waiting;
  u64 given = 0, done = 0;
  u32 weight = 1;
};

std::recursive_mutex lock;
std::vector<Stream*> streams;
std::map<std::string, long> calls;

// How the tests want it.
struct {
  bool permuted = false;
  u64 random = 1;
  std::string fails;
  long fails_at = 0;
  Result fails_with = OK;
  long skipped_wait = 0;
  long twisted_launch = 0, twisted_copy = 0;
  size_t twist_at = 0, twist_width = 0;
  long twist_by = 0;
  long waits = 0, launches = 0;
  std::vector<std::pair<size_t, size_t>> copies;  // rows of each, and bytes of a row
  size_t memory_bytes = 4ul << 30;
  int devices = 1, version = 13000;
} mode;

Result broken = OK;  // an error that stays, as the driver's do

u64 chance(u64 below) {
  mode.random ^= mode.random << 13;
  mode.random ^= mode.random >> 7;
  mode.random ^= mode.random << 17;
  return mode.random % below;
}

bool can_run(const Stream& stream) {
  if (stream.waiting.empty()) return false;
  const Operation& next = stream.waiting.front();
  return !next.after || next.after->done >= next.position;
}

void run_next(Stream& stream) {
  Operation next = std::move(stream.waiting.front());
  stream.waiting.pop_front();
  if (next.run) next.run();
  stream.done++;
}

// Lets streams go ahead, some much more often than others.
void stir() {
  if (!mode.permuted) return;
  for (u64 n = chance(6); n > 0; --n) {
    u64 all = 0;
    for (Stream* stream : streams)
      if (can_run(*stream)) all += stream->weight;
    if (!all) return;
    u64 at = chance(all);
    for (Stream* stream : streams) {
      if (!can_run(*stream)) continue;
      if (at < stream->weight) {
        run_next(*stream);
        break;
      }
      at -= stream->weight;
    }
  }
}

// Runs a stream up to a position, and of the others what that needs.
void advance(Stream* stream, u64 position) {
  while (stream->done < position) {
    const Operation& next = stream->waiting.front();
    if (can_run(*stream))
      run_next(*stream);
    else
      advance(next.after, next.position);
    stir();
  }
}

void give(Stream* stream, std::function<void()> run) {
  stream->waiting.push_back({std::move(run)});
  stream->given++;
}

Stream* stream_of(void* handle) {
  static Stream* legacy = [] {
    streams.push_back(new Stream);
    return streams.back();
  }();
  return (uintptr_t)handle <= 2 ? legacy : (Stream*)handle;
}

// Whether this one is the wait that a test takes out.
bool is_skipped() { return ++mode.waits == mode.skipped_wait; }

// ---------------------------------------------------------------- memory

constexpr size_t PAGE = 4096;

struct Allocation {
  size_t bytes, mapped;
};

std::map<Address, Allocation> device;    // by start
std::map<Address, size_t> registered;    // host memory
size_t used = 0;
thread_local void* current = nullptr;

template <class Map>
typename Map::iterator holder(Map& map, Address at) {
  auto next = map.upper_bound(at);
  return next == map.begin() ? map.end() : std::prev(next);
}

bool on_device(Address at, size_t bytes) {
  auto found = holder(device, at);
  return found != device.end() && at + bytes <= found->first + found->second.bytes;
}

enum class Host { PINNED, PAGEABLE, CROSSES };

Host host_of(Address at, size_t bytes) {
  auto found = holder(registered, at);
  if (found != registered.end() && at < found->first + found->second)
    return at + bytes <= found->first + found->second ? Host::PINNED : Host::CROSSES;
  auto next = registered.lower_bound(at);
  return next != registered.end() && next->first < at + bytes ? Host::CROSSES : Host::PAGEABLE;
}

Result allocate(Address* at, size_t bytes, bool there) {
  if (!bytes) return INVALID_VALUE;
  if (used + bytes > mode.memory_bytes) return OUT_OF_MEMORY;
  size_t mapped = (bytes + PAGE - 1) / PAGE * PAGE;
  char* start = (char*)mmap(nullptr, mapped + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return OUT_OF_MEMORY;
  // Ends at the guard page, as far as the alignment allows: reading on is a crash.
  char* memory = start + PAGE + (mapped - bytes) / 256 * 256;
  used += bytes;
  *at = (Address)memory;
  device[*at] = {bytes, mapped};
  auto appear = [start, mapped] {
    mprotect(start + PAGE, mapped, PROT_READ | PROT_WRITE);
    memset(start + PAGE, 0xCD, mapped);
  };
  if (there) appear();
  return OK;
}

Result release(Address at) {
  auto found = device.find(at);
  if (found == device.end()) return INVALID_VALUE;
  used -= found->second.bytes;
  mprotect((void*)(at / PAGE * PAGE), found->second.mapped, PROT_NONE);
  device.erase(found);
  return OK;
}

struct Rows {
  Address to, from;
  size_t bytes, rows, to_pitch, from_pitch;
};

void copy_rows(const Rows& copy) {
  for (size_t row = 0; row < copy.rows; ++row)
    memcpy((void*)(copy.to + row * copy.to_pitch), (void*)(copy.from + row * copy.from_pitch), copy.bytes);
}

// Between host and device.
Result transfer(Rows copy, bool to_device, void* handle) {
  mode.copies.push_back({copy.rows, copy.bytes});
  if ((long)mode.copies.size() == mode.twisted_copy) {
    size_t* fields[] = {&copy.to, &copy.from, &copy.bytes, &copy.rows, &copy.to_pitch, &copy.from_pitch};
    *fields[mode.twist_at] += mode.twist_by;
  }
  if (!copy.rows || (copy.rows > 1 && (copy.to_pitch < copy.bytes || copy.from_pitch < copy.bytes))) return INVALID_VALUE;
  size_t to_bytes = (copy.rows - 1) * copy.to_pitch + copy.bytes;
  size_t from_bytes = (copy.rows - 1) * copy.from_pitch + copy.bytes;
  Address on = to_device ? copy.to : copy.from, host = to_device ? copy.from : copy.to;
  size_t on_bytes = to_device ? to_bytes : from_bytes, host_bytes = to_device ? from_bytes : to_bytes;
  if (!on_device(on, on_bytes)) return INVALID_VALUE;
  Stream* stream = stream_of(handle);
  switch (host_of(host, host_bytes)) {
    case Host::CROSSES:
      return INVALID_VALUE;
    case Host::PINNED:
      give(stream, [copy] { copy_rows(copy); });
      return OK;
    case Host::PAGEABLE:
      if (!to_device) {
        give(stream, [copy] { copy_rows(copy); });
        advance(stream, stream->given);
        return broken;
      }
      auto kept = std::make_shared<std::vector<char>>((char*)host, (char*)host + host_bytes);
      give(stream, [copy, kept]() mutable {
        copy.from = (Address)kept->data();
        copy_rows(copy);
      });
      return OK;
  }
  return INVALID_VALUE;
}

// ---------------------------------------------------------------- every call

Result enter(const char* name, bool in_context) {
  long nth = ++calls[name];
  if (broken) return broken;
  if (mode.fails == name && nth == mode.fails_at) {
    if (mode.fails_with >= 700 && mode.fails_with < 710) broken = mode.fails_with;
    return mode.fails_with;
  }
  if (in_context && !current) return INVALID_CONTEXT;
  stir();
  return OK;
}

struct Function {
  std::string name;
  size_t params_bytes;
};

}  // namespace

#define ENTER(in_context)                                  \
  std::lock_guard<std::recursive_mutex> guard(lock);       \
  if (Result result = enter(__func__, in_context)) return result

// ---------------------------------------------------------------- device and context

API Result cuInit(unsigned) {
  ENTER(false);
  return OK;
}
API Result cuDriverGetVersion(int* version) {
  ENTER(false);
  *version = mode.version;
  return OK;
}
API Result cuDeviceGetCount(int* count) {
  ENTER(false);
  *count = mode.devices;
  return OK;
}
API Result cuDeviceGet(int* handle, int ordinal) {
  ENTER(false);
  *handle = ordinal;
  return ordinal < mode.devices ? OK : INVALID_DEVICE;
}
API Result cuDeviceGetName(char* name, int bytes, int) {
  ENTER(false);
  snprintf(name, bytes, "no GPU (test)");
  return OK;
}
API Result cuDeviceTotalMem_v2(size_t* bytes, int) {
  ENTER(false);
  *bytes = mode.memory_bytes;
  return OK;
}
API Result cuDeviceGetAttribute(int* value, int attribute, int) {
  ENTER(false);
  switch (attribute) {
    case 16: *value = 132; break;  // multiprocessors
    case 75: *value = 9; break;    // compute capability
    case 76: *value = 0; break;
    case 115: *value = 1; break;   // memory pools
    default: *value = 0;
  }
  return OK;
}
API Result cuDevicePrimaryCtxRetain(void** context, int) {
  ENTER(false);
  static int primary;
  *context = &primary;
  return OK;
}
API Result cuDevicePrimaryCtxRelease_v2(int) { return OK; }
API Result cuCtxSetCurrent(void* context) {
  ENTER(false);
  current = context;
  return OK;
}
API Result cuCtxGetCurrent(void** context) {
  *context = current;
  return OK;
}
API Result cuCtxSynchronize() {
  ENTER(true);
  for (Stream* stream : streams) advance(stream, stream->given);
  return broken;
}

// ---------------------------------------------------------------- streams and events

API Result cuStreamCreate(void** stream, unsigned) {
  ENTER(true);
  auto made = new Stream;
  // Some go ahead of all others, and some not before they must.
  made->weight = mode.permuted && chance(3) ? 1u << chance(10) : 0;
  streams.push_back(made);
  *stream = made;
  return OK;
}
// Streams and events stay: what was given to them may still run.
API Result cuStreamDestroy_v2(void*) { return OK; }
API Result cuEventDestroy_v2(void*) { return OK; }
API Result cuStreamSynchronize(void* stream) {
  ENTER(true);
  if (!is_skipped()) advance(stream_of(stream), stream_of(stream)->given);
  return broken;
}
API Result cuStreamWaitEvent(void* stream, void* handle, unsigned) {
  ENTER(true);
  auto event = (Event*)handle;
  if (is_skipped() || !event->stream) return OK;
  stream_of(stream)->waiting.push_back({nullptr, event->stream, event->position});
  stream_of(stream)->given++;
  return OK;
}
API Result cuEventCreate(void** event, unsigned) {
  ENTER(true);
  *event = new Event;
  return OK;
}
API Result cuEventRecord(void* handle, void* stream) {
  ENTER(true);
  auto event = (Event*)handle;
  give(stream_of(stream), nullptr);
  event->stream = stream_of(stream);
  event->position = event->stream->given;
  return OK;
}
API Result cuEventQuery(void* handle) {
  ENTER(true);
  auto event = (Event*)handle;
  return !event->stream || event->stream->done >= event->position ? OK : NOT_READY;
}
API Result cuEventSynchronize(void* handle) {
  ENTER(true);
  auto event = (Event*)handle;
  if (!is_skipped() && event->stream) advance(event->stream, event->position);
  return broken;
}
API Result cuEventElapsedTime(float* ms, void*, void*) {
  ENTER(true);
  *ms = 1;
  return OK;
}
API Result cuEventElapsedTime_v2(float* ms, void* start, void* end) { return cuEventElapsedTime(ms, start, end); }

// ---------------------------------------------------------------- memory

API Result cuMemAlloc_v2(Address* at, size_t bytes) {
  ENTER(true);
  return allocate(at, bytes, true);
}
API Result cuMemAllocAsync(Address* at, size_t bytes, void* stream) {
  ENTER(true);
  Result result = allocate(at, bytes, false);
  if (result) return result;
  Address start = *at / PAGE * PAGE;
  size_t mapped = device[*at].mapped;
  give(stream_of(stream), [=] {
    mprotect((void*)start, mapped, PROT_READ | PROT_WRITE);
    memset((void*)start, 0xCD, mapped);
  });
  return OK;
}
API Result cuMemFree_v2(Address at) {
  ENTER(true);
  for (Stream* stream : streams) advance(stream, stream->given);
  return release(at);
}
API Result cuMemFreeAsync(Address at, void* stream) {
  ENTER(true);
  give(stream_of(stream), [=] { release(at); });
  return OK;
}
API Result cuMemHostAlloc(void** at, size_t bytes, unsigned) {
  ENTER(true);
  if (posix_memalign(at, PAGE, bytes)) return OUT_OF_MEMORY;
  registered[(Address)*at] = bytes;
  return OK;
}
API Result cuMemFreeHost(void* at) {
  ENTER(true);
  registered.erase((Address)at);
  free(at);
  return OK;
}
API Result cuMemHostRegister_v2(void* at, size_t bytes, unsigned) {
  ENTER(true);
  if (host_of((Address)at, bytes) != Host::PAGEABLE) return ALREADY_REGISTERED;
  registered[(Address)at] = bytes;
  return OK;
}
API Result cuMemHostUnregister(void* at) {
  ENTER(true);
  return registered.erase((Address)at) ? OK : NOT_REGISTERED;
}
API Result cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void* stream) {
  ENTER(true);
  return transfer({to, (Address)from, bytes, 1, bytes, bytes}, true, stream);
}
API Result cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void* stream) {
  ENTER(true);
  return transfer({(Address)to, from, bytes, 1, bytes, bytes}, false, stream);
}
API Result cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void* stream) {
  ENTER(true);
  if (!on_device(to, bytes) || !on_device(from, bytes)) return INVALID_VALUE;
  give(stream_of(stream), [=] { memcpy((void*)to, (void*)from, bytes); });
  return OK;
}
API Result cuMemsetD8Async(Address at, unsigned char value, size_t bytes, void* stream) {
  ENTER(true);
  if (!on_device(at, bytes)) return INVALID_VALUE;
  give(stream_of(stream), [=] { memset((void*)at, value, bytes); });
  return OK;
}

// As in cuda.h.
struct Copy2D {
  size_t from_x, from_y;
  u32 from_type;
  const void* from_host;
  Address from_device;
  void* from_array;
  size_t from_pitch, to_x, to_y;
  u32 to_type;
  void* to_host;
  Address to_device;
  void* to_array;
  size_t to_pitch, bytes, rows;
};

API Result cuMemcpy2DAsync_v2(const Copy2D* copy, void* stream) {
  ENTER(true);
  const u32 HOST = 1, DEVICE = 2;
  bool to_device = copy->from_type == HOST && copy->to_type == DEVICE;
  if (!to_device && !(copy->from_type == DEVICE && copy->to_type == HOST)) return INVALID_VALUE;
  Address from = to_device ? (Address)copy->from_host : copy->from_device;
  Address to = to_device ? copy->to_device : (Address)copy->to_host;
  return transfer({to, from, copy->bytes, copy->rows, copy->to_pitch, copy->from_pitch}, to_device, stream);
}

// ---------------------------------------------------------------- kernels

API Result cuModuleLoadData(void** module, const void* image) {
  ENTER(true);
  if (!strstr((const char*)image, ".version")) return INVALID_IMAGE;
  *module = new std::string((const char*)image);
  return OK;
}
API Result cuModuleUnload(void*) { return OK; }
API Result cuModuleGetFunction(void** function, void* module, const char* name) {
  ENTER(true);
  // The size of the parameters is in the PTX, so a struct that drifted away from it is found.
  const std::string& ptx = *(std::string*)module;
  size_t entry = ptx.find(std::string(".entry ") + name + "(");
  if (entry == std::string::npos) return NOT_FOUND;
  size_t size = ptx.find("_param_0[", entry);
  if (size == std::string::npos || size > ptx.find(')', entry)) return INVALID_IMAGE;
  *function = new Function{name, (size_t)atol(ptx.c_str() + size + 9)};
  return OK;
}
API Result cuLaunchKernel(void* handle, u32 blocks, u32 by, u32 bz, u32 threads, u32 ty, u32 tz, u32, void* stream, void** params, void**) {
  ENTER(true);
  if (!blocks || by != 1 || bz != 1 || !threads || threads > 1024 || ty != 1 || tz != 1) return INVALID_VALUE;
  auto function = (Function*)handle;
  std::vector<char> kept((char*)params[0], (char*)params[0] + function->params_bytes);
  if (++mode.launches == mode.twisted_launch) {
    long value = 0;
    memcpy(&value, &kept[mode.twist_at], mode.twist_width);
    value += mode.twist_by;
    memcpy(&kept[mode.twist_at], &value, mode.twist_width);
  }
  u64 seed = mode.permuted ? chance(1u << 30) : 0;
  give(stream_of(stream), [=] {
    if (!run_kernel(function->name.c_str(), blocks, threads, kept.data(), seed)) broken = ILLEGAL_ADDRESS;
  });
  return OK;
}
API Result cuGetErrorName(int, const char** name) {
  *name = "TEST_ERROR";
  return OK;
}
API Result cuGetErrorString(int error, const char** text) {
  static thread_local char buffer[32];
  snprintf(buffer, sizeof buffer, "error %d (test)", error);
  *text = buffer;
  return OK;
}

// ---------------------------------------------------------------- for tests

// Everything as at the start; seed 0: lazy, others: permuted.
API void mock_reset(u64 seed) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  for (Stream* stream : streams) advance(stream, stream->given);
  broken = OK;
  calls.clear();
  registered.clear();  // of memory that is gone: what failed could not give it back
  mode = {};
  mode.permuted = seed != 0;
  mode.random = seed * 0x9E3779B97F4A7C15ull | 1;
}
// Runs all that was given to any stream; no wait that a test counts.
API void mock_drain() {
  std::lock_guard<std::recursive_mutex> guard(lock);
  for (Stream* stream : streams) advance(stream, stream->given);
}
// The nth call of a function fails. From 700 to 709: and all after it.
API void mock_fail(const char* name, long nth, int result) {
  mode.fails = name, mode.fails_at = nth, mode.fails_with = result;
}
// The nth wait does not wait.
API void mock_skip_wait(long nth) { mode.skipped_wait = nth; }
// A number in the parameters of the nth launch is wrong.
API void mock_twist_launch(long nth, size_t at, size_t width, long by) {
  mode.twisted_launch = nth, mode.twist_at = at, mode.twist_width = width, mode.twist_by = by;
}
// A number of the nth transfer is wrong: to, from, bytes, rows, pitch to, pitch from.
API void mock_twist_copy(long nth, size_t field, long by) {
  mode.twisted_copy = nth, mode.twist_at = field, mode.twist_by = by;
}
API long mock_calls(const char* name) { return calls[name]; }
API long mock_waits() { return mode.waits; }
API long mock_launches() { return mode.launches; }
API long mock_copies() { return mode.copies.size(); }
API long mock_rows(long nth) { return mode.copies[nth - 1].first; }
API long mock_row_bytes(long nth) { return mode.copies[nth - 1].second; }
API void mock_machine(int devices, int version, size_t memory_bytes) {
  mode.devices = devices, mode.version = version, mode.memory_bytes = memory_bytes;
}
API size_t mock_registered() {
  size_t bytes = 0;
  for (auto& one : registered) bytes += one.second;
  return bytes;
}
