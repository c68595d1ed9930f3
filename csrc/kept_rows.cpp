#include "kept_rows.h"

#include <algorithm>

namespace shoal {
namespace {

constexpr std::uint32_t kBatch = 256;

}  // namespace

KeptRows::KeptRows(std::vector<PreImages::Form> forms, std::uint32_t since, std::uint32_t version,
                   std::size_t budget_bytes, OpenSnapshots& open)
    : since_(since), span_(version - since), open_(open), overwritten_(forms.size()) {
  for (const PreImages::Form& form : forms) rows_.push_back(form.rows);
  images_ = std::make_shared<PreImages>(std::move(forms), budget_bytes, open.clock_);
  const std::uint32_t now = tick();
  for (const std::shared_ptr<KeptRows>& older : open.all_) {
    Shared& one = shared_[others_++];
    one.images = older->images_;
    one.clock = now;
    one.runs = older->images_->runs();
  }
}

std::uint32_t KeptRows::tick() const { return open_.tick(); }

void KeptRows::share(const PreImages& images) {
  for (std::size_t k = 0; k < others_; ++k) {
    if (shared_[k].images.get() == &images) shared_[k].needed.store(true, std::memory_order_relaxed);
  }
}

void KeptRows::leave(const PreImages& images) {
  for (std::size_t k = 0; k < others_; ++k) {
    if (shared_[k].images.get() == &images && !shared_[k].needed) shared_[k].images.reset();
  }
}

std::vector<const KeptRows::Shared*> KeptRows::sources() const {
  std::vector<const Shared*> found;
  for (std::size_t k = 0; k < others_; ++k) {
    if (shared_[k].needed) found.push_back(&shared_[k]);
  }
  return found;
}

void KeptRows::visit(FairLock& lock, int table, std::uint64_t first, std::uint64_t last,
                     const PreImages::Visit& visit) const {
  images_->visit(lock, table, first, last, 0, visit);
  for (const Shared* source : sources()) {
    const auto own = [&](const PreImage& image, const char* weights, const char* state) {
      if (!stamped(image.version) || earlier(image.clock, source->clock)) return;
      visit(image, weights, state);
    };
    source->images->visit(lock, table, first, last, source->runs, own);
  }
}

void KeptRows::check() const {
  images_->check();
  for (const Shared* source : sources()) source->images->check();
}

bool OpenSnapshots::close(const KeptRows& rows) {
  const auto at = std::find_if(all_.begin(), all_.end(),
                               [&](const std::shared_ptr<KeptRows>& one) { return one.get() == &rows; });
  if (at == all_.end()) return false;
  for (auto younger = at + 1; younger != all_.end(); ++younger) (*younger)->leave(*rows.images_);
  all_.erase(at);
  return true;
}

void OpenSnapshots::make_bits(int table) {
  for (const std::shared_ptr<KeptRows>& one : all_) {
    one->overwritten_[table].resize((one->rows_[table] + 63) / 64);
  }
}

void OpenSnapshots::overwrite(int table, std::uint32_t row) {
  for (const std::shared_ptr<KeptRows>& one : all_) {
    if (row >= one->rows_[table]) continue;
    one->overwritten_[table][row / 64] |= std::uint64_t{1} << (row % 64);
  }
}

bool OpenSnapshots::older_keeps(std::size_t k, int table, std::uint32_t row,
                                std::uint32_t version) const {
  for (std::size_t older = 0; older < k; ++older) {
    if (all_[older]->unchanged(table, row, version) && !all_[older]->images_->failed()) return true;
  }
  return false;
}

void OpenSnapshots::keep(int table, const RowView& view, const std::int32_t* rows,
                         const std::uint32_t* versions, std::uint32_t n) noexcept {
  for (std::size_t k = 0; k < all_.size(); ++k) keep_for(k, table, view, rows, versions, n);
}

void OpenSnapshots::keep_for(std::size_t k, int table, const RowView& view,
                             const std::int32_t* rows, const std::uint32_t* versions,
                             std::uint32_t n) noexcept {
  const KeptRows& own = *all_[k];
  if (own.images_->failed()) return;
  // Apart from the object, whose numbers the compiler would load again for every row.
  const std::uint32_t first = own.since_ + 1, span = own.span_;
  const std::size_t high = own.rows_[table];
  const bool plain = own.overwritten_[table].empty();
  std::int32_t chosen[kBatch];
  std::uint32_t stamps[kBatch];
  for (std::uint32_t i = 0; i < n;) {
    std::uint32_t many = 0;
    for (; i < n && many < kBatch; ++i) {
      const auto row = static_cast<std::uint32_t>(rows[i]);
      const std::uint32_t version = versions == nullptr ? row_version(view, row) : versions[i];
      if (version - first >= span || row >= high) continue;
      if (!plain && !own.unchanged(table, row, version)) continue;
      if (k > 0 && older_keeps(k, table, row, version)) continue;
      chosen[many] = rows[i];
      stamps[many++] = version;
    }
    if (many == 0) continue;
    for (std::size_t younger = k + 1; younger < all_.size(); ++younger) {
      KeptRows& other = *all_[younger];
      for (std::uint32_t c = 0; c < many; ++c) {
        if (!other.unchanged(table, static_cast<std::uint32_t>(chosen[c]), stamps[c])) continue;
        other.share(*own.images_);
        break;
      }
    }
    own.images_->add(table, view, chosen, stamps, many);
  }
}

}  // namespace shoal
