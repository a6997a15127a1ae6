// Every instrumented load and store ends here: bounds, alignment, read-only inputs, reads of
// unwritten memory, and data races under Metal's barrier rules.
#include <cstdio>
#include <cstring>

#include "machine.h"

Region* find_region(uintptr_t address) {
  static Region* last = nullptr;
  for (Region* r : gpu.regions)
    if (r == last && address >= r->low && address < r->high) return r;
  for (Region* r : gpu.regions)
    if (address >= r->low && address < r->high) return last = r;
  return nullptr;
}

void out_of_bounds(uintptr_t address, unsigned bytes, bool write, uint64_t pc) {
  const Region* nearest = nullptr;
  uint64_t best = ~0ull;
  for (const Region* r : gpu.regions) {
    uint64_t distance = address < r->low     ? r->low - address
                        : address >= r->high ? address - r->high + 1
                                             : 0;
    if (distance < best) {
      best = distance;
      nearest = r;
    }
  }
  char where[200] = "no buffer";
  if (nearest && address < nearest->low)
    snprintf(where, sizeof where, "%llu bytes before the start of '%s'",
             (unsigned long long)(nearest->low - address), nearest->name.c_str());
  else if (nearest)
    snprintf(where, sizeof where, "offset %llu of '%s', which has %llu bytes",
             (unsigned long long)(address - nearest->low), nearest->name.c_str(),
             (unsigned long long)(nearest->high - nearest->low));
  char what[40] = "memory fault";
  if (bytes) snprintf(what, sizeof what, "%u-byte %s", bytes, write ? "write" : "read");
  std::string who =
      gpu.current ? describe_thread(gpu.current->thread.index_in_threadgroup) : "a thread";
  report("out-of-bounds", pc, 0, "%s: %s at %s", who.c_str(), what, where);
}

// Does something order `earlier` before what the current thread does now?
static bool ordered(const Access& earlier, bool device) {
  if (!earlier.thread) return true;
  // Nothing orders two threadgroups; their threadgroup memories are different memories.
  if (earlier.threadgroup != gpu.threadgroup) return !device;
  const MslThread& me = gpu.current->thread;
  if (earlier.thread - 1 == me.index_in_threadgroup) return true;
  if (earlier.epoch != gpu.epoch[device]) return true;
  return (earlier.thread - 1) / kLanes == me.simdgroup &&
         earlier.simd_epoch != gpu.simdgroups[me.simdgroup].epoch[device];
}

static void race(const Region& region, size_t byte, const Access& earlier, const char* was,
                 const char* is, uint64_t pc) {
  if (seen_before("race", pc, earlier.pc)) return;
  report("race", pc, earlier.pc, "'%s' byte %zu: %s by %s is not ordered with the %s by %s%s",
         region.name.c_str(), byte, is,
         describe_thread(gpu.current->thread.index_in_threadgroup).c_str(), was,
         describe_thread(earlier.thread - 1).c_str(),
         earlier.threadgroup != gpu.threadgroup ? " of another threadgroup" : "");
}

static void check_read(Region& region, size_t byte, bool atomic, const Access& me) {
  Cell& cell = region.cells[byte];
  if (!cell.initialised) {
    report("uninitialised", me.pc, 0, "%s reads '%s' byte %zu, never written%s",
           describe_thread(me.thread - 1).c_str(), region.name.c_str(), byte,
           region.device ? "" : " in this threadgroup");
    cell.initialised = true;
  }
  if (!(atomic && cell.atomic_write) && !ordered(cell.write, region.device))
    race(region, byte, cell.write, "write", atomic ? "atomic read" : "read", me.pc);
  bool replace = !cell.reads[0].thread || ordered(cell.reads[0], region.device);
  cell.reads[replace ? 0 : 1] = me;
  cell.atomic_read = atomic;
}

static void check_write(Region& region, size_t byte, bool atomic, const Access& me) {
  Cell& cell = region.cells[byte];
  const char* is = atomic ? "atomic write" : "write";
  if (!(atomic && cell.atomic_write) && !ordered(cell.write, region.device))
    race(region, byte, cell.write, "write", is, me.pc);
  if (!(atomic && cell.atomic_read))
    for (const Access& read : cell.reads)
      if (!ordered(read, region.device)) {
        race(region, byte, read, "read", is, me.pc);
        break;
      }
  cell.write = me;
  cell.atomic_write = atomic;
  cell.reads[0].thread = cell.reads[1].thread = 0;
  cell.initialised = true;
}

static bool own_memory(uintptr_t address) {
  const Fiber& fiber = *gpu.current;
  if (address >= uintptr_t(fiber.stack_low) && address < uintptr_t(fiber.stack_high)) return true;
  auto* slots = gpu.simdgroups.data();  // lane exchange
  return address >= uintptr_t(slots) && address < uintptr_t(slots + gpu.simdgroups.size());
}

static void maybe_preempt() {
  if (!gpu.config.preempt || random_bits() % gpu.config.preempt) return;
  make_ready(*gpu.current);
  wait_for_scheduler();
}

void check_access(uintptr_t address, unsigned bytes, Kind kind, bool atomic, bool aligned,
                  uint64_t pc) {
  if (!gpu.current || own_memory(address)) return;
  gpu.accesses++;
  const bool write = kind != Kind::kRead;
  Region* region = find_region(address);
  if (!region && !write && address >= gpu.code_low && address < gpu.code_high) return;
  if (!region || address + bytes > region->high) {
    out_of_bounds(address, bytes, write, pc);
    stop_the_kernel();
  }
  const size_t byte = address - region->low;
  if (aligned && (address & (bytes - 1)))
    report("misaligned", pc, 0, "%s: %u-byte access at offset %zu of '%s' is not aligned",
           describe_thread(gpu.current->thread.index_in_threadgroup).c_str(), bytes, byte,
           region->name.c_str());
  if (write && !region->writable) {
    report("read-only", pc, 0, "%s writes to input '%s'",
           describe_thread(gpu.current->thread.index_in_threadgroup).c_str(),
           region->name.c_str());
    stop_the_kernel();
  }
  if (!region->shadowed) return;
  const MslThread& thread = gpu.current->thread;
  const Access me{thread.index_in_threadgroup + 1, gpu.threadgroup, gpu.epoch[region->device],
                  gpu.simdgroups[thread.simdgroup].epoch[region->device], pc};
  for (size_t i = byte; i < byte + bytes; i++) {
    if (kind != Kind::kWrite) check_read(*region, i, atomic, me);
    if (write) check_write(*region, i, atomic, me);
  }
  maybe_preempt();
}

// A new threadgroup finds other contents in its memory, and none of it counts as written.
void forget_threadgroup_memory() {
  for (Region* r : gpu.regions) {
    if (r->device || !r->writable) continue;
    if (gpu.config.poison == 2)
      for (uintptr_t a = r->low; a < r->high; a++) *(uint8_t*)a = uint8_t(random_bits());
    else
      memset((void*)r->low, gpu.config.poison ? 0xff : 0, r->high - r->low);
    for (Cell& cell : r->cells) cell = Cell{};
  }
}
