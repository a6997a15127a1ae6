// What a launch executes: basic blocks by number, and accesses to device and threadgroup memory.
#include <cstring>

#include "machine.h"

static std::vector<uint64_t> blocks;
static uint64_t loads[2], stores[2], loaded_bytes[2], stored_bytes[2];

extern "C" {
void msl_block(uint32_t id) {
  if (id >= blocks.size()) blocks.resize(id + 256);
  blocks[id]++;
}

void msl_load(const void* p, uint32_t bytes) {
  Region* region = find_region(uintptr_t(p));
  if (!region) return;
  loads[region->device]++;
  loaded_bytes[region->device] += bytes;
  region->touched.resize(region->high - region->low);
  for (uint32_t i = 0; i < bytes; i++) region->touched[uintptr_t(p) + i - region->low] = true;
}

void msl_store(const void* p, uint32_t bytes) {
  Region* region = find_region(uintptr_t(p));
  if (!region) return;
  stores[region->device]++;
  stored_bytes[region->device] += bytes;
}

void msl_count_begin() {
  blocks.clear();
  for (auto* counter : {loads, stores, loaded_bytes, stored_bytes})
    memset(counter, 0, 2 * sizeof(uint64_t));
}

uint64_t msl_block_count(uint32_t id) { return id < blocks.size() ? blocks[id] : 0; }

// Loads and stores of threadgroup and of device memory, bytes of the latter, distinct bytes read.
void msl_counted(uint64_t* out) {
  uint64_t distinct = 0;
  for (const Region* region : gpu.regions)
    if (region->device)
      for (bool touched : region->touched) distinct += touched;
  const uint64_t all[] = {loads[0], stores[0],       loads[1], stores[1],
                          loaded_bytes[1], stored_bytes[1], distinct};
  memcpy(out, all, sizeof all);
}
}
