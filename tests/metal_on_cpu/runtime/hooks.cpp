// What compiled kernels call: the shim's lane exchange, barriers and loop counters, and the
// callbacks of clang's thread and undefined-behaviour sanitizer passes, which are defined here
// instead of linking the sanitizers' own runtimes.
#include <cstring>

#include "machine.h"

#define CALLER (uint64_t(__builtin_return_address(0)) - 1)
#define FRAME ((void**)__builtin_frame_address(0))

static const char* base_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

extern "C" {
MslLanes __msl_simd(const char* op, const void* payload, unsigned bytes, unsigned uniform,
                    const char* file, unsigned line, unsigned column) {
  Fiber& fiber = *gpu.current;
  Simdgroup& group = gpu.simdgroups[fiber.thread.simdgroup];
  const uint32_t parity = group.parity;
  memcpy(group.slots[parity][fiber.thread.lane], payload, bytes);
  fiber.site = {op, file, line, column, call_path(fiber, FRAME)};
  fiber.uniform_argument = uniform;
  fiber.state = State::kSimdOp;
  wait_for_scheduler();
  return {&group.slots[parity][0][0], group.mask, fiber.thread.lane, gpu.config.reduce_order};
}

void __msl_barrier(int whole_group, unsigned flags, const char* file, unsigned line,
                   unsigned column) {
  Fiber& fiber = *gpu.current;
  const char* op = whole_group ? "threadgroup_barrier" : "simdgroup_barrier";
  fiber.site = {op, file, line, column, call_path(fiber, FRAME)};
  fiber.barrier_flags = flags;
  fiber.uniform_argument = 0;
  fiber.state = whole_group ? State::kGroupBarrier : State::kSimdBarrier;
  wait_for_scheduler();
}

void __msl_bad_lane(const char* op, unsigned lane, const char* file, unsigned line,
                    unsigned column) {
  report("inactive-lane", 0, (uint64_t(line) << 12) + column,
         "%s: %s reads lane %u, which is not active",
         describe_thread(gpu.current->thread.index_in_threadgroup).c_str(),
         describe_site({op, file, line, column, 0}).c_str(), lane);
}

void __msl_loop_push() {
  Fiber& fiber = *gpu.current;
  if (fiber.loop_depth < kMaxLoops) fiber.loops[fiber.loop_depth] = 0;
  fiber.loop_depth++;
}
void __msl_loop_pop() { gpu.current->loop_depth--; }
bool __msl_tick() {
  Fiber& fiber = *gpu.current;
  if (fiber.loop_depth && fiber.loop_depth <= kMaxLoops) fiber.loops[fiber.loop_depth - 1]++;
  return true;
}

void __msl_atomic_access(const void* p, unsigned bytes, int kind) {
  check_access(uintptr_t(p), bytes, Kind(kind), true, true, CALLER);
}

#define ACCESS(name, bytes, kind, aligned) \
  void __tsan_##name##bytes(void* p) {     \
    check_access(uintptr_t(p), bytes, Kind::kind, false, aligned, CALLER); \
  }
#define ACCESSES(bytes)                          \
  ACCESS(read, bytes, kRead, true)               \
  ACCESS(write, bytes, kWrite, true)             \
  ACCESS(unaligned_read, bytes, kRead, false)    \
  ACCESS(unaligned_write, bytes, kWrite, false)  \
  ACCESS(read_write, bytes, kReadWrite, true)    \
  ACCESS(unaligned_read_write, bytes, kReadWrite, false) \
  ACCESS(volatile_read, bytes, kRead, true)      \
  ACCESS(volatile_write, bytes, kWrite, true)
ACCESSES(1) ACCESSES(2) ACCESSES(4) ACCESSES(8) ACCESSES(16)

static void range(const void* p, uintptr_t bytes, Kind kind, uint64_t pc) {
  if (bytes) check_access(uintptr_t(p), unsigned(bytes), kind, false, false, pc);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read_range(void* p, uintptr_t n) { range(p, n, Kind::kRead, CALLER); }
void __tsan_write_range(void* p, uintptr_t n) { range(p, n, Kind::kWrite, CALLER); }
void* __tsan_memcpy(void* to, const void* from, uintptr_t n) {
  range(from, n, Kind::kRead, CALLER);
  range(to, n, Kind::kWrite, CALLER);
  return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, uintptr_t n) {
  range(from, n, Kind::kRead, CALLER);
  range(to, n, Kind::kWrite, CALLER);
  return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, uintptr_t n) {
  range(to, n, Kind::kWrite, CALLER);
  return memset(to, value, n);
}

// The data that a handler gets begins with the source location.
struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
static void undefined(const char* what, const SourceLocation* at) {
  std::string who =
      gpu.current ? describe_thread(gpu.current->thread.index_in_threadgroup) : "a thread";
  report("undefined", 0, (uint64_t(at->line) << 16) + at->column, "%s: %s at %s:%u:%u",
         who.c_str(), what, base_name(at->file), at->line, at->column);
}
#define UNDEFINED(name, what)                                                      \
  void __ubsan_handle_##name(SourceLocation* at, uintptr_t, uintptr_t) {           \
    undefined(what, at);                                                           \
  }
UNDEFINED(out_of_bounds, "array index out of bounds")
UNDEFINED(shift_out_of_bounds, "shift out of bounds")
UNDEFINED(add_overflow, "signed integer overflow (+)")
UNDEFINED(sub_overflow, "signed integer overflow (-)")
UNDEFINED(mul_overflow, "signed integer overflow (*)")
UNDEFINED(negate_overflow, "signed integer overflow (unary -)")
UNDEFINED(float_cast_overflow, "float value out of range of the integer type")
UNDEFINED(load_invalid_value, "invalid bool value")
// The processor would trap on the division itself.
void __ubsan_handle_divrem_overflow(SourceLocation* at, uintptr_t, uintptr_t) {
  undefined("integer division by zero or overflow", at);
  stop_the_kernel();
}

// clang calls these for float -> bfloat; older libgcc lacks them. Round to nearest even.
__bf16 __truncsfbf2(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bool nan = (bits & 0x7fffffff) > 0x7f800000;
  uint16_t high = uint16_t(nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  __bf16 out;
  memcpy(&out, &high, 2);
  return out;
}
__bf16 __truncdfbf2(double x) { return __truncsfbf2(float(x)); }
}
