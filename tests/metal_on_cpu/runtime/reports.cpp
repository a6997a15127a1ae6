// What was found, and the words for it.
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "machine.h"

Machine gpu;

uint32_t random_bits() {
  uint64_t& s = gpu.random_state;
  s ^= s << 13;
  s ^= s >> 7;
  s ^= s << 17;
  return uint32_t(s >> 16);
}

std::string describe_thread(uint32_t index) {
  char text[64];
  snprintf(text, sizeof text, "thread %u (simdgroup %u lane %u)", index, index / kLanes,
           index % kLanes);
  return text;
}

std::string describe_site(const Site& site) {
  const char* slash = strrchr(site.file, '/');
  char text[200];
  snprintf(text, sizeof text, "%s at %s:%u:%u", site.op, slash ? slash + 1 : site.file, site.line,
           site.column);
  return text;
}

bool seen_before(const char* kind, uint64_t pc, uint64_t other_pc) {
  for (MslReport& r : gpu.reports)
    if (r.pc == pc && r.other_pc == other_pc && !strcmp(r.kind, kind)) {
      if (++r.count >= kEnough) gpu.stopped = true;
      return true;
    }
  return gpu.reports.size() >= gpu.config.max_reports;
}

void report(const char* kind, uint64_t pc, uint64_t other_pc, const char* format, ...) {
  if (seen_before(kind, pc, other_pc)) return;
  MslReport r{};
  snprintf(r.kind, sizeof r.kind, "%s", kind);
  r.pc = pc;
  r.other_pc = other_pc;
  r.count = 1;
  char text[480];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  snprintf(r.message, sizeof r.message, "threadgroup %u: %s", gpu.threadgroup, text);
  gpu.reports.push_back(r);
}
