#pragma once
// Threads that work during training.

namespace shoal {

// Lets this thread, and those it starts, run when nobody else wants the core: niceness 10; it cuts
// short no other thread when it wakes, and one that wakes next to it does not wait for the end of its
// slice. Only Linux has these for each thread; elsewhere nothing is changed.
void give_way();

}  // namespace shoal
