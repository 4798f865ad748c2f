// What an accelerator does after the call that asked for it: streams, events, and memory in use.
//
// Operators compute at once, in the order in which the host launches them. What would go wrong on an
// accelerator that is late is found by clocks: each stream, and the host, knows of every stream the
// last operation that it has waited for. A launch fails if it touches memory whose last use it has
// not waited for. Memory of the host gets a copy's bytes only when the host has waited for the copy;
// until then it holds POISON. Every operation takes time (PRETENDED_LATE, a seed), in which the
// host goes on.

#pragma once

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace late {

constexpr int DEVICES = 2, STREAMS_OF_DEVICE = 32, STREAMS = DEVICES * STREAMS_OF_DEVICE;
constexpr unsigned char POISON = 0xff;  // NaN in every floating-point type
constexpr int64_t LONGEST_NS = 40'000, NS_OF_COPIED_KIB = 200;

using Clock = std::array<int64_t, STREAMS>;

struct Use {
  int stream = -1;
  int64_t number = 0;
  std::string name;
};

struct Block {
  char* memory;
  size_t size;
  int owner;  // the stream that was current when it was allocated
  bool on_host;
  Use written;
  std::map<int, Use> read;
  std::set<int> recorded;  // streams for which it is kept
};

struct Landing {  // the part of a copy that the host sees
  int stream;
  int64_t number;
  char* host;
  std::vector<char> bytes;
  Block* block;
  bool arrives;  // else it leaves, and must not change meanwhile
  std::string name;
};

struct Event {
  Clock clock{};
  int64_t end_ns = 0;
};

struct Counts {
  int64_t waits = 0;     // of the host for a stream, an event or a number
  int64_t unpinned = 0;  // copies between the device and memory that is not pinned
};

inline std::mutex lock;
inline std::map<char*, Block*> blocks;
inline std::array<Clock, STREAMS> known{};
inline std::array<int64_t, STREAMS> end_ns{};
inline Clock host{};
inline std::list<Landing> landings;
inline std::string fault;  // found where nothing can be thrown
inline Counts counts;
inline const char* const seed = std::getenv("PRETENDED_LATE");
inline std::mt19937_64 random(seed ? std::strtoull(seed, nullptr, 10) : 0);
inline thread_local std::array<int, DEVICES> current{};  // stream of each device
inline thread_local int within = 0;                      // an operator that moves memory itself

inline int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

inline int index_of(const c10::Stream& stream) {
  return stream.device_index() * STREAMS_OF_DEVICE + static_cast<int>(stream.id());
}

inline void join(Clock& clock, const Clock& other) {
  for (int stream = 0; stream < STREAMS; ++stream)
    clock[stream] = std::max(clock[stream], other[stream]);
}

inline bool is_over(const Use& use, const Clock& clock) {
  return use.stream < 0 || clock[use.stream] >= use.number;
}

inline void raise_fault() {
  if (!fault.empty()) {
    auto words = std::exchange(fault, "");
    TORCH_CHECK(false, "race: ", words);
  }
}

inline Block* block_of(const void* address) {
  auto* at = static_cast<char*>(const_cast<void*>(address));
  auto next = blocks.upper_bound(at);
  if (next == blocks.begin()) return nullptr;
  auto* block = std::prev(next)->second;
  return at < block->memory + std::max<size_t>(block->size, 1) ? block : nullptr;
}

inline Block* allocate(size_t size, int device, bool on_host) {
  auto* memory = static_cast<char*>(std::malloc(size ? size : 1));
  if (!memory) throw std::runtime_error("pretended out of memory");
  std::memset(memory, POISON, size);
  std::lock_guard guard(lock);
  auto* block = new Block{
      memory, size, device * STREAMS_OF_DEVICE + current[device], on_host, {}, {}, {}};
  blocks[memory] = block;
  return block;
}

// Memory goes to later operators of its stream at once; pinned memory waits for its copies.
inline void release(Block* block) {
  std::lock_guard guard(lock);
  auto check = [&](const Use& use) {
    if (block->on_host || use.stream < 0 || use.stream == block->owner) return;
    if (block->recorded.count(use.stream) || is_over(use, host)) return;
    if (!is_over(use, known[block->owner]))
      fault = "memory was freed while " + use.name + " of stream " + std::to_string(use.stream) +
          " may use it, and belongs to stream " + std::to_string(block->owner);
  };
  check(block->written);
  for (auto& [_, use] : block->read) check(use);
  landings.remove_if([&](const Landing& landing) { return landing.block == block; });
  blocks.erase(block->memory);
  std::free(block->memory);
  delete block;
}

// Returns the number of a new operation of a stream. The caller holds the lock.
inline int64_t launch(
    const std::string& name, int stream, const std::vector<Block*>& reads,
    const std::vector<Block*>& writes, size_t copied_bytes = 0) {
  raise_fault();
  auto& clock = known[stream];
  join(clock, host);
  Use use{stream, ++clock[stream], name};
  auto need = [&](const Use& other, const char* what) {
    TORCH_CHECK(
        is_over(other, clock), "race: ", name, " of stream ", stream, what, other.name, " of stream ",
        other.stream, ", for which it has not waited");
  };
  for (auto* block : reads) {
    need(block->written, " reads what is written by ");
    block->read[stream] = use;
  }
  for (auto* block : writes) {
    need(block->written, " overwrites what is written by ");
    for (auto& [_, other] : block->read) need(other, " overwrites what is read by ");
    block->read.clear();
    block->written = use;
  }
  int64_t cost = copied_bytes / 1024 * NS_OF_COPIED_KIB + (seed ? random() % LONGEST_NS : 0);
  end_ns[stream] = std::max(now_ns(), end_ns[stream]) + (seed ? cost : 0);
  return use.number;
}

// The host knows that what a clock contains is over. The caller holds the lock.
inline void host_waited_for(const Clock& clock) {
  join(host, clock);
  for (auto at = landings.begin(); at != landings.end();) {
    if (host[at->stream] < at->number) {
      ++at;
      continue;
    }
    if (at->arrives)
      std::memcpy(at->host, at->bytes.data(), at->bytes.size());
    else if (std::memcmp(at->host, at->bytes.data(), at->bytes.size()))
      fault = "the host changed its memory while " + at->name + " copied it";
    at = landings.erase(at);
  }
}

inline void wait(const Clock& clock, int64_t until_ns) {
  auto rest = until_ns - now_ns();
  if (rest > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(rest));
  std::lock_guard guard(lock);
  ++counts.waits;
  host_waited_for(clock);
  raise_fault();
}

inline void wait_for_stream(int stream) {
  Clock clock;
  int64_t until;
  {
    std::lock_guard guard(lock);
    clock = known[stream];
    until = end_ns[stream];
  }
  wait(clock, until);
}

// Copies are made now; the host sees them when it has waited.
inline void land(
    int stream, int64_t number, void* host_memory, size_t size, bool arrives,
    const std::string& name) {
  auto* at = static_cast<char*>(host_memory);
  landings.push_back(
      {stream, number, at, std::vector<char>(at, at + size), block_of(at), arrives, name});
  if (arrives) std::memset(at, POISON, size);
}

// What other copies bring to memory of the host that a copy reads now, in the order of its stream.
inline void land_before(const Clock& clock, const void* host_memory, size_t size) {
  auto* from = static_cast<const char*>(host_memory);
  for (auto& landing : landings) {
    if (!landing.arrives || landing.host + landing.bytes.size() <= from || landing.host >= from + size)
      continue;
    TORCH_CHECK(
        clock[landing.stream] >= landing.number, "race: a copy reads memory of the host to which ",
        landing.name, " of stream ", landing.stream, " still writes");
    std::memcpy(landing.host, landing.bytes.data(), landing.bytes.size());
  }
}

} // namespace late
