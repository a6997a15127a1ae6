// The functions that Python calls: buffers with guard pages, memory regions, dispatch, reports.
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "machine.h"

static sigjmp_buf fault_exit;
static volatile bool dispatching;

static void on_fault(int, siginfo_t* info, void*) {
  if (!dispatching) {
    signal(SIGSEGV, SIG_DFL);
    return;
  }
  const char* address = (const char*)info->si_addr;
  const Fiber* f = gpu.current;
  if (f && address >= f->stack_low - 2 * kPageBytes && address < f->stack_low)
    report("stack-overflow", 0, 0, "%s: stack overflow (unbounded recursion?)",
           describe_thread(f->thread.index_in_threadgroup).c_str());
  else
    out_of_bounds(uintptr_t(address), 0, false, 0);
  gpu.stopped = true;
  siglongjmp(fault_exit, 1);
}

static char* fiber_stacks() {
  static char* stacks = nullptr;
  if (stacks) return stacks;
  stacks = (char*)mmap(nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (uint32_t i = 0; i < kMaxThreads; i++)
    mprotect(stacks + i * kStackBytes, kPageBytes, PROT_NONE);
  static char signal_stack[65536];
  stack_t alternate{signal_stack, 0, sizeof signal_stack};
  sigaltstack(&alternate, nullptr);
  return stacks;
}

struct Layout {
  uint32_t grid[3], group[3], groups[3];
};

static void place(MslThread& t, const Layout& l, const uint32_t at[3], const uint32_t size[3],
                  uint32_t index) {
  const uint32_t p[3] = {index % size[0], index / size[0] % size[1], index / size[0] / size[1]};
  for (int i = 0; i < 3; i++) {
    t.position_in_threadgroup[i] = p[i];
    t.threadgroup_position[i] = at[i];
    t.position_in_grid[i] = at[i] * l.group[i] + p[i];
    t.threadgroups_per_grid[i] = l.groups[i];
    t.threads_per_grid[i] = l.grid[i];
    t.threads_per_threadgroup[i] = size[i];
    t.dispatch_threads_per_threadgroup[i] = l.group[i];
  }
  t.index_in_threadgroup = index;
  t.lane = index % kLanes;
  t.simdgroup = index / kLanes;
  t.simdgroups = (gpu.threads + kLanes - 1) / kLanes;
  t.dispatch_simdgroups = (l.group[0] * l.group[1] * l.group[2] + kLanes - 1) / kLanes;
}

static void run_one(const Layout& l, uint32_t index) {
  const uint32_t at[3] = {index % l.groups[0], index / l.groups[0] % l.groups[1],
                          index / l.groups[0] / l.groups[1]};
  uint32_t size[3];  // groups at the edge of the grid are smaller
  for (int i = 0; i < 3; i++) size[i] = std::min(l.group[i], l.grid[i] - at[i] * l.group[i]);
  gpu.threads = size[0] * size[1] * size[2];
  gpu.threadgroup = index;
  gpu.epoch[0] = gpu.epoch[1] = 1;
  gpu.simdgroups.assign((gpu.threads + kLanes - 1) / kLanes, Simdgroup{});
  for (Simdgroup& group : gpu.simdgroups) group.epoch[0] = group.epoch[1] = 1;
  forget_threadgroup_memory();
  gpu.ready.assign((gpu.threads + 63) / 64, 0);
  gpu.ready_count = 0;
  char* stacks = fiber_stacks();
  for (uint32_t i = 0; i < gpu.threads; i++) {
    Fiber& fiber = gpu.fibers[i];
    fiber.stack_low = stacks + i * kStackBytes + kPageBytes;
    fiber.stack_high = stacks + (i + 1) * kStackBytes;
    place(fiber.thread, l, at, size, i);
    gpu.simdgroups[fiber.thread.simdgroup].size++;
    start_fiber(fiber);
  }
  run_threadgroup();
}

static size_t body_bytes(uint64_t bytes, uint64_t skew) {
  return std::max<size_t>((bytes + skew + 15) / 16 * 16, 16);
}
static size_t page_bytes(size_t body) { return (body + kPageBytes - 1) / kPageBytes * kPageBytes; }

extern "C" {
// The end of the buffer, up to 16-byte alignment, lies at an unmapped page. `skew` bytes misalign
// it, as the offset of a sliced array does.
void* msl_alloc(uint64_t bytes, uint64_t skew) {
  size_t body = body_bytes(bytes, skew), mapped = page_bytes(body);
  char* base = (char*)mmap(nullptr, mapped + 2 * kPageBytes, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  mprotect(base + kPageBytes, mapped, PROT_READ | PROT_WRITE);
  return base + kPageBytes + mapped - body + skew;
}

void msl_free(void* p, uint64_t bytes, uint64_t skew) {
  size_t body = body_bytes(bytes, skew), mapped = page_bytes(body);
  munmap((char*)p - skew + body - mapped - kPageBytes, mapped + 2 * kPageBytes);
}

void msl_reset(const MslConfig* config) {
  for (Region* r : gpu.regions) delete r;
  gpu.regions.clear();
  gpu.reports.clear();
  gpu.config = *config;
}

void msl_region(void* p, uint64_t bytes, const char* name, int writable, int device, int shadowed,
                int initialised) {
  auto* r = new Region{uintptr_t(p),   uintptr_t(p) + bytes, name,
                       bool(writable), bool(device),         bool(shadowed), {}, {}};
  if (shadowed) {
    Cell cell{};
    cell.initialised = initialised;
    r->cells.assign(bytes, cell);
  }
  gpu.regions.push_back(r);
}

// Bytes of an output that no thread wrote: mask[i] is 1 for each.
void msl_unwritten(const char* name, uint8_t* mask) {
  for (const Region* r : gpu.regions)
    if (r->device && r->shadowed && r->name == name)
      for (size_t i = 0; i < r->cells.size(); i++) mask[i] = !r->cells[i].write.thread;
}

void msl_dispatch(MslEntry entry, void** buffers, const uint32_t* grid, const uint32_t* group,
                  uint64_t code_low, uint64_t code_high) {
  gpu.entry = entry;
  gpu.buffers = buffers;
  gpu.code_low = code_low;
  gpu.code_high = code_high;
  gpu.stopped = false;
  gpu.random_state = gpu.config.seed * 0x9E3779B97F4A7C15ull + 0x1234567;
  gpu.accesses = gpu.switches = gpu.simd_ops = gpu.barriers = 0;
  gpu.fibers.resize(kMaxThreads);
  fiber_stacks();
  Layout layout;
  for (int i = 0; i < 3; i++) {
    layout.grid[i] = grid[i];
    layout.group[i] = std::min(group[i], grid[i]);
    layout.groups[i] = (grid[i] + layout.group[i] - 1) / layout.group[i];
  }
  std::vector<uint32_t> order(layout.groups[0] * layout.groups[1] * layout.groups[2]);
  for (uint32_t i = 0; i < order.size(); i++) order[i] = i;
  if (gpu.config.order == 1) std::reverse(order.begin(), order.end());
  if (gpu.config.order == 2)
    for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[random_bits() % i]);

  struct sigaction action {}, old_segv{}, old_bus{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &old_segv);
  sigaction(SIGBUS, &action, &old_bus);
  dispatching = true;
  if (sigsetjmp(fault_exit, 1) == 0)
    for (size_t i = 0; i < order.size() && !gpu.stopped; i++) run_one(layout, order[i]);
  dispatching = false;
  gpu.current = nullptr;
  sigaction(SIGSEGV, &old_segv, nullptr);
  sigaction(SIGBUS, &old_bus, nullptr);
}

int msl_report_count() { return int(gpu.reports.size()); }
const MslReport* msl_report(int index) { return &gpu.reports[index]; }
void msl_statistics(uint64_t* out) {
  out[0] = gpu.accesses;
  out[1] = gpu.switches;
  out[2] = gpu.simd_ops;
  out[3] = gpu.barriers;
}
}
