#include "team.h"

#if defined(__linux__)
#include <sched.h>
#endif

#include <system_error>

namespace {

// Longer than what is between two ops of a step.
constexpr auto SPIN_TIME = std::chrono::microseconds(100);
constexpr auto A_WHILE = std::chrono::seconds(10);

// Waits until the word is another than `seen`.
void await_change(std::atomic<uint32_t>& word, uint32_t seen, std::atomic<int>& sleepers) {
  if (watch(word, seen, SPIN_TIME)) return;
  sleepers.fetch_add(1);
  while (word.load() == seen) sleep_until_changed(word, seen, A_WHILE);
  sleepers.fetch_sub(1);
}

// Where a helper runs. Linux likes to wake a thread on its waker's processor, where it waits for the waker to rest,
// which a team's caller does not: a helper that finds itself there moves to the others.
class Place {
#if defined(__linux__)
 public:
  Place() { knows_ = sched_getaffinity(0, sizeof all_, &all_) == 0; }

  static int processor() { return sched_getcpu(); }

  void avoid(int processor) {
    if (!knows_ || processor != Place::processor()) return;
    cpu_set_t others = all_;
    CPU_CLR(processor, &others);
    if (CPU_COUNT(&others)) sched_setaffinity(0, sizeof others, &others);
  }

 private:
  cpu_set_t all_;
  bool knows_;
#else
 public:
  static int processor() { return -1; }
  void avoid(int) {}
#endif
};

// A process that is forked has the memory of its parent's teams, but not their threads.
std::atomic<int> num_forks{0};

struct OwnTeam {
  std::unique_ptr<Team> team;
  int size = 0;
  int fork = 0;

  ~OwnTeam() { leave_if_forked(); }

  void leave_if_forked() {
    if (fork != num_forks.load()) (void)team.release();
  }
};

}  // namespace

Team::Team(int size) {
  try {
    while (int(helpers_.size()) < size - 1) helpers_.emplace_back([this] { help(); });
  } catch (const std::system_error&) {
    // Fewer will do.
  }
}

Team::~Team() {
  ends_ = true;
  round_.fetch_add(1);
  wake(round_);
  for (auto& helper : helpers_) helper.join();
}

void Team::help() {
  Place place;
  for (uint32_t last = 0; !ends_.load();) {
    const uint32_t round = round_.load();
    if (round % 2 == 0 || round == last) {
      await_change(round_, round, sleepers_);
      continue;
    }
    place.avoid(caller_processor_.load());
    // The caller closes the round before it looks who is busy, so a round that is open now stays until this is done.
    busy_.fetch_add(1);
    if (round_.load() == round && !ends_.load()) call_(what_);
    busy_.fetch_sub(1);
    if (waiting_.load()) wake(busy_);
    last = round;
  }
}

void Team::open() {
  caller_processor_.store(Place::processor());
  round_.fetch_add(1);
  if (sleepers_.load()) wake(round_);
}

void Team::close() {
  round_.fetch_add(1);
  while (const uint32_t busy = busy_.load()) await_change(busy_, busy, waiting_);
}

Team& team_of(int size) {
  static const int watched = pthread_atfork(nullptr, nullptr, [] { num_forks++; });
  (void)watched;
  thread_local OwnTeam own;
  own.leave_if_forked();
  if (!own.team || own.size != size) {
    own.team = nullptr;
    own.team = std::make_unique<Team>(size);
    own.size = size;
    own.fork = num_forks.load();
  }
  return *own.team;
}
