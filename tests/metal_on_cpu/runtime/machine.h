// The pieces of the emulated GPU that the runtime's files share: one fiber for each thread of the
// running threadgroup, its simdgroups of 32, and the memory regions a kernel may touch.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

constexpr uint32_t kLanes = 32, kMaxThreads = 1024, kMaxLoops = 62;
// A kernel that is wrong everywhere is stopped once one of its findings has occurred this often.
constexpr uint64_t kEnough = 4096;
constexpr size_t kStackBytes = 128 * 1024, kPageBytes = 4096, kSlotBytes = 64;

extern "C" {
// Filled in for every thread; the launcher that compiler.py generates reads it.
struct MslThread {
  uint32_t position_in_grid[3], position_in_threadgroup[3], threadgroup_position[3];
  uint32_t threadgroups_per_grid[3], threads_per_grid[3], threads_per_threadgroup[3];
  uint32_t dispatch_threads_per_threadgroup[3];
  uint32_t index_in_threadgroup, lane, simdgroup, simdgroups, dispatch_simdgroups;
};
typedef void (*MslEntry)(void** buffers, const MslThread* thread);

struct MslReport {
  char kind[32];
  char message[600];
  uint64_t pc, other_pc, count;
};

struct MslConfig {
  uint64_t seed;
  uint32_t order;         // 0 forward, 1 reverse, 2 random
  uint32_t preempt;       // switch threads at one in this many memory accesses; 0 is never
  uint32_t reduce_order;  // 0 butterfly, else another order of the sums inside a simdgroup
  uint32_t poison;        // threadgroup memory before a group runs: 0 zero, 1 all ones, 2 random
  uint32_t max_reports;
};

// What a simdgroup operation gets back: the values of all lanes.
struct MslLanes {
  const unsigned char* slots;
  uint32_t mask, lane, order;
};
}

enum class State : uint8_t { kReady, kSimdOp, kSimdBarrier, kGroupBarrier, kDone };
enum MemFlag : uint32_t { kDeviceFlag = 1, kThreadgroupFlag = 2 };

// Where a thread waits. `path` identifies the dynamic instance: the call chain up to the kernel
// and the iteration of every enclosing loop.
struct Site {
  const char* op;
  const char* file;
  uint32_t line, column;
  uint64_t path;
};

struct Fiber {
  void* stack_pointer;
  char *stack_low, *stack_high;
  State state;
  Site site;
  uint32_t uniform_argument, barrier_flags;
  uint32_t loop_depth, loops[kMaxLoops];
  MslThread thread;
};

struct Simdgroup {
  uint32_t size, ready, at_op, at_barrier;
  uint32_t epoch[2];  // barriers passed, by memory: threadgroup, device
  uint32_t parity, mask;
  unsigned char slots[2][kLanes][kSlotBytes];
};

// One access in the shadow of a byte. `thread` is the index in the threadgroup plus 1; 0 is none.
struct Access {
  uint32_t thread, threadgroup, epoch, simd_epoch;
  uint64_t pc;
};

struct Cell {
  Access write, reads[2];
  bool initialised, atomic_write, atomic_read;
};

struct Region {
  uintptr_t low, high;
  std::string name;
  bool writable, device, shadowed;
  std::vector<Cell> cells;
  std::vector<bool> touched;
};

struct Machine {
  MslConfig config;
  MslEntry entry;
  void** buffers;
  uintptr_t code_low, code_high;
  std::vector<Region*> regions;
  std::vector<MslReport> reports;
  std::vector<Fiber> fibers;
  std::vector<Simdgroup> simdgroups;
  std::vector<uint64_t> ready;  // one bit a thread
  uint32_t ready_count, threads, threadgroup, epoch[2];
  uint64_t random_state, accesses, switches, simd_ops, barriers;
  Fiber* current;
  void* scheduler_stack;
  bool stopped;
};
extern Machine gpu;

uint32_t random_bits();
std::string describe_thread(uint32_t index);
std::string describe_site(const Site& site);
bool seen_before(const char* kind, uint64_t pc, uint64_t other_pc);  // counts it, if so
void report(const char* kind, uint64_t pc, uint64_t other_pc, const char* format, ...);

void make_ready(Fiber& fiber);
void wait_for_scheduler();             // the current fiber gives up the core
[[noreturn]] void stop_the_kernel();   // the current fiber ends the whole dispatch
void run_threadgroup();
void start_fiber(Fiber& fiber);
uint64_t call_path(const Fiber& fiber, void** frame);

Region* find_region(uintptr_t address);
void out_of_bounds(uintptr_t address, unsigned bytes, bool write, uint64_t pc);
enum class Kind { kRead, kWrite, kReadWrite };
void check_access(uintptr_t address, unsigned bytes, Kind kind, bool atomic, bool aligned,
                  uint64_t pc);
void forget_threadgroup_memory();
