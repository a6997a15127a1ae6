// Context switch, scheduler and the rules by which waiting threads may go on.
#include "machine.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

extern "C" void msl_switch(void** save, void* load);
#if defined(__x86_64__)
asm(R"(
.text
.globl msl_switch
.type msl_switch,@function
msl_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl msl_switch
.type msl_switch,%function
msl_switch:
  stp x19, x20, [sp, #-160]!
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp d14, d15, [sp, #144]
  ldp d12, d13, [sp, #128]
  ldp d10, d11, [sp, #112]
  ldp d8, d9, [sp, #96]
  ldp x29, x30, [sp, #80]
  ldp x27, x28, [sp, #64]
  ldp x25, x26, [sp, #48]
  ldp x23, x24, [sp, #32]
  ldp x21, x22, [sp, #16]
  ldp x19, x20, [sp], #160
  ret
)");
#else
#error "no context switch for this processor"
#endif

void wait_for_scheduler() {
  gpu.switches++;
  Fiber* fiber = gpu.current;
  gpu.current = nullptr;
  msl_switch(&fiber->stack_pointer, gpu.scheduler_stack);
}

void stop_the_kernel() {
  void* dropped;
  gpu.stopped = true;
  gpu.current = nullptr;
  msl_switch(&dropped, gpu.scheduler_stack);
  abort();
}

static void fiber_main() {
  gpu.entry(gpu.buffers, &gpu.current->thread);
  gpu.current->state = State::kDone;
  wait_for_scheduler();
  abort();
}

void start_fiber(Fiber& fiber) {
  uintptr_t top = (uintptr_t(fiber.stack_high) & ~uintptr_t(15)) - 16;
#if defined(__x86_64__)
  void** stack = (void**)top;
  *--stack = nullptr;
  *--stack = (void*)fiber_main;
  stack -= 6;
  memset(stack, 0, 6 * sizeof(void*));
#else
  void** stack = (void**)(top - 160);
  memset(stack, 0, 160);
  stack[11] = (void*)fiber_main;  // the slot of x30, the return address
#endif
  fiber.stack_pointer = stack;
  fiber.loop_depth = 0;
  make_ready(fiber);
}

void make_ready(Fiber& fiber) {
  uint32_t index = fiber.thread.index_in_threadgroup;
  fiber.state = State::kReady;
  gpu.simdgroups[fiber.thread.simdgroup].ready++;
  gpu.ready[index / 64] |= uint64_t(1) << (index % 64);
  gpu.ready_count++;
}

uint64_t call_path(const Fiber& fiber, void** frame) {
  uint64_t hash = 0;
  for (int depth = 0; depth < 24; depth++) {
    if ((char*)frame < fiber.stack_low || (char*)(frame + 2) > fiber.stack_high) break;
    hash = hash * 0x9E3779B97F4A7C15ull + (uint64_t)frame[1];
    frame = (void**)frame[0];
  }
  for (uint32_t i = 0; i < std::min(fiber.loop_depth, kMaxLoops); i++)
    hash = hash * 0x9E3779B97F4A7C15ull + fiber.loops[i] + 1;
  return hash;
}

static uint32_t next_thread() {
  const uint32_t words = uint32_t(gpu.ready.size());
  uint32_t word = 0;
  if (gpu.config.order == 1) {
    for (word = words - 1; !gpu.ready[word];) word--;
    return word * 64 + 63 - uint32_t(__builtin_clzll(gpu.ready[word]));
  }
  if (gpu.config.order == 0) {
    while (!gpu.ready[word]) word++;
    return word * 64 + uint32_t(__builtin_ctzll(gpu.ready[word]));
  }
  uint32_t skip = random_bits() % gpu.ready_count;
  for (;; word++) {
    uint32_t count = uint32_t(__builtin_popcountll(gpu.ready[word]));
    if (skip < count) break;
    skip -= count;
  }
  uint64_t bits = gpu.ready[word];
  while (skip--) bits &= bits - 1;
  return word * 64 + uint32_t(__builtin_ctzll(bits));
}

static bool same_instance(const Site& a, const Site& b) {
  return a.path == b.path && a.line == b.line && a.column == b.column && a.op == b.op &&
         !strcmp(a.file, b.file);
}

static std::string ranges(const std::vector<uint32_t>& ids) {
  std::string out;
  for (size_t i = 0; i < ids.size();) {
    size_t j = i;
    while (j + 1 < ids.size() && ids[j + 1] == ids[j] + 1) j++;
    out += (out.empty() ? "" : ",") + std::to_string(ids[i]);
    if (j > i) out += "-" + std::to_string(ids[j]);
    i = j + 1;
  }
  return out;
}

// "0-15 wait in simd_sum at k.metal:3:9; 16-31 left the kernel"
static std::string who_waits_where(uint32_t low, uint32_t high) {
  std::vector<std::pair<std::string, std::vector<uint32_t>>> groups;
  for (uint32_t i = low; i < high; i++) {
    const Fiber& f = gpu.fibers[i];
    std::string what = "left the kernel";
    if (f.state == State::kReady) what = "run";
    if (f.state != State::kReady && f.state != State::kDone) {
      what = "wait in " + describe_site(f.site);
      for (uint32_t j = low; j < i; j++) {
        const Site& other = gpu.fibers[j].site;
        if (gpu.fibers[j].state == f.state && other.line == f.site.line &&
            other.column == f.site.column && other.path != f.site.path) {
          what += " (another call path or loop iteration)";
          break;
        }
      }
    }
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const auto& g) { return g.first == what; });
    if (group == groups.end()) group = groups.insert(groups.end(), {what, {}});
    group->second.push_back(i - low);
  }
  std::string out;
  for (const auto& group : groups)
    out += (out.empty() ? "" : "; ") + ranges(group.second) + " " + group.first;
  return out;
}

static void pass_barrier(uint32_t flags, uint32_t epoch[2]) {
  if (flags & kThreadgroupFlag) epoch[0]++;
  if (flags & kDeviceFlag) epoch[1]++;
  gpu.barriers++;
}

static void release_simdgroup(Simdgroup& group, uint32_t first) {
  const Fiber& leader = gpu.fibers[first];
  for (uint32_t i = 1; i < group.size; i++)
    if (gpu.fibers[first + i].uniform_argument != leader.uniform_argument) {
      report("non-uniform", 0, (uint64_t(leader.site.line) << 12) + leader.site.column,
             "%s: lanes pass different values where Metal wants one for the whole simdgroup",
             describe_site(leader.site).c_str());
      break;
    }
  if (group.at_op) {
    group.mask = group.size == kLanes ? ~0u : (1u << group.size) - 1;
    group.parity ^= 1;
    gpu.simd_ops++;
  } else {
    pass_barrier(leader.barrier_flags, group.epoch);
  }
  group.at_op = group.at_barrier = 0;
  for (uint32_t i = 0; i < group.size; i++) make_ready(gpu.fibers[first + i]);
}

static void check_simdgroup(uint32_t index) {
  Simdgroup& group = gpu.simdgroups[index];
  if (group.ready || (!group.at_op && !group.at_barrier)) return;
  const uint32_t first = index * kLanes;
  bool together = group.at_op == group.size || group.at_barrier == group.size;
  for (uint32_t i = 1; together && i < group.size; i++)
    together = same_instance(gpu.fibers[first].site, gpu.fibers[first + i].site);
  if (together) return release_simdgroup(group, first);
  report("divergence", 0, (uint64_t(index) << 32) + 1,
         "simdgroup %u cannot proceed together: lanes %s", index,
         who_waits_where(first, first + group.size).c_str());
  gpu.stopped = true;
}

static void check_threadgroup() {
  uint32_t done = 0, waiting = 0;
  const Fiber* leader = nullptr;
  for (uint32_t i = 0; i < gpu.threads; i++) {
    const Fiber& f = gpu.fibers[i];
    if (f.state == State::kDone) done++;
    if (f.state != State::kGroupBarrier) continue;
    if (!leader) leader = &f;
    waiting += same_instance(f.site, leader->site);
  }
  if (done == gpu.threads) return;
  if (waiting < gpu.threads) {
    report("divergence", 0, 2, "threadgroup_barrier not reached by all threads: threads %s",
           who_waits_where(0, gpu.threads).c_str());
    gpu.stopped = true;
    return;
  }
  pass_barrier(leader->barrier_flags, gpu.epoch);
  for (uint32_t i = 0; i < gpu.threads; i++) make_ready(gpu.fibers[i]);
}

void run_threadgroup() {
  while (!gpu.stopped) {
    if (!gpu.ready_count) check_threadgroup();
    if (!gpu.ready_count) return;
    uint32_t index = next_thread();
    gpu.ready[index / 64] &= ~(uint64_t(1) << (index % 64));
    gpu.ready_count--;
    Fiber& fiber = gpu.fibers[index];
    Simdgroup& group = gpu.simdgroups[fiber.thread.simdgroup];
    group.ready--;
    gpu.current = &fiber;
    msl_switch(&gpu.scheduler_stack, fiber.stack_pointer);
    if (gpu.stopped) return;
    group.at_op += fiber.state == State::kSimdOp;
    group.at_barrier += fiber.state == State::kSimdBarrier;
    check_simdgroup(fiber.thread.simdgroup);
  }
}
