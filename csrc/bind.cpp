// Python face of the core. Tensors arrive as data pointers that the Python side has checked:
// building array objects costs more than a small lookup.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <stdexcept>

#include "bind.h"
#include "bind_specs.h"
#include "shard.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shoal {
namespace {

// A ticket keeps its shard alive.
struct PyTicket {
  std::shared_ptr<Shard> owner;
  std::unique_ptr<Ticket> ticket;
};

// Checked on construction: whatever holds groups may read by them. Python words the refusal.
struct PyGroups {
  std::int64_t n;
  int count;
  Address ids;
  std::vector<std::int64_t> splits;  // of our own: what was checked is what is used
  std::vector<std::int32_t> tables;

  PyGroups(std::int64_t n_ids, int groups, Address ids_at, Address splits_at, Address tables_at,
           int n_tables)
      : n(n_ids),
        count(groups),
        ids(ids_at),
        splits(at<const std::int64_t>(splits_at), at<const std::int64_t>(splits_at) + groups + 1),
        tables(at<const std::int32_t>(tables_at), at<const std::int32_t>(tables_at) + groups) {
    bool good = splits[0] == 0 && splits[count] == n;
    for (int g = 0; g < count; ++g) {
      good = good && splits[g] <= splits[g + 1] && tables[g] >= 0 && tables[g] < n_tables;
    }
    if (!good) throw std::invalid_argument("groups");
  }

  Groups get() const {
    return Groups{at<const std::int64_t>(ids), n, splits.data(), tables.data(), count};
  }

  // True when offsets [count * bags + 1] rise and meet the groups' edges.
  bool bags_fit(Address offsets, std::int64_t bags) const {
    const auto* offset = at<const std::int64_t>(offsets);
    if (bags == 0) return n == 0 && *offset == 0;
    std::int64_t bad = 0;
    for (std::int64_t i = 0; i < count * bags; ++i) bad += offset[i] > offset[i + 1];
    for (int g = 0; g <= count; ++g) bad += offset[g * bags] != splits[g];
    return bad == 0;
  }
};

}  // namespace

template <>
struct Wire<const Groups&> {
  using Type = const PyGroups&;
  static Groups read(const PyGroups& given) { return given.get(); }
};

namespace {

StepParams step_of(std::int64_t global_step, std::uint32_t event_time_s, int nan_policy = 0,
                   double nan_clip = 1.0) {
  StepParams step;
  step.global_step = global_step;
  step.event_time_s = event_time_s;
  step.nan_policy = nan_policy;
  step.nan_clip = nan_clip;
  return step;
}

void bind_values(nb::module_& m) {
  m.def("pooled32", &pooled<float, std::size_t, std::size_t>, "rows"_a, "columns"_a);
  m.def("pooled64", &pooled<double, std::size_t, std::size_t>, "rows"_a, "columns"_a);
  nb::class_<PyTicket>(m, "Ticket")
      .def("end", [](PyTicket& t) { t.owner->end(*t.ticket); })
      .def_prop_ro("live", [](const PyTicket& t) { return t.ticket->live.load(); })
      .def_prop_ro("event_time_s", [](const PyTicket& t) { return t.ticket->event_time_s; })
      .def("admitted",
           [](const PyTicket& t, Address out) {
             const auto& rows = t.ticket->rows;
             for (std::size_t i = 0; i < rows.size(); ++i) at<bool>(out)[i] = rows[i] >= 0;
           })
      .def("found", [](const PyTicket& t, Address out) {
        std::fill_n(at<bool>(out), t.ticket->rows.size(), true);
        for (const std::int64_t i : t.ticket->missing) at<bool>(out)[i] = false;
      });
  nb::class_<Plan>(m, "Plan").def(nb::new_(&Wired<&plan_from>::call));
  nb::class_<PyGroups>(m, "Groups")
      .def(nb::init<std::int64_t, int, Address, Address, Address, int>())
      .def("bags_fit", &PyGroups::bags_fit);
  nb::class_<GradArgs>(m, "Record")
      .def("__init__",
           [](GradArgs* self, PyTicket* ticket, const Plan* plan, Address offsets,
              std::int64_t bags, Address weights, const Addresses& grads,
              double scale) {
             new (self) GradArgs{ticket->ticket.get(), plan, at<const std::int64_t>(offsets), bags,
                                 at<const float>(weights), all_at<void>(grads), scale, {}};
           },
           "ticket"_a, "plan"_a.none(), "offsets"_a, "bags"_a, "weights"_a, "grads"_a, "scale"_a,
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>());
  nb::class_<Sums>(m, "Sums")
      .def_ro("table", &Sums::table)
      .def_prop_ro("n", [](const Sums& s) { return s.ids.size(); })
      .def("copy_to", [](const Sums& s, Address ids, Address sums, Address counts) {
        std::memcpy(at<void>(ids), s.ids.data(), s.ids.size() * 8);
        std::memcpy(at<void>(sums), s.sums.data(), s.sums.size());
        std::memcpy(at<void>(counts), s.counts.data(), s.counts.size() * 8);
      });
  nb::class_<Exported>(m, "Exported")
      .def_ro("n", &Exported::n)
      .def("copy_to", [](const Exported& e, const Addresses& addresses) {
        const RowColumns to = columns_at(addresses);
        std::copy(e.ids.begin(), e.ids.end(), to.ids);
        std::copy(e.versions.begin(), e.versions.end(), to.versions);
        std::copy(e.seen.begin(), e.seen.end(), to.seen_s);
        std::copy(e.counts.begin(), e.counts.end(), to.counts);
        std::copy(e.weights.begin(), e.weights.end(), to.weights);
        std::copy(e.state.begin(), e.state.end(), to.state);
      });
}

void bind_lookups(nb::class_<Shard>& shard) {
  shard
      .def("find", &Wired<&Shard::find>::call, Release())
      .def("find_pooled",
           [](Shard& s, const PyGroups& g, const Plan& plan, Address offsets, std::int64_t bags,
              Address weights, const Addresses& outputs, int threads) {
             const std::vector<void*> out = all_at<void>(outputs);
             s.find_pooled(g.get(),
                                 GatherArgs{&plan, at<const std::int64_t>(offsets), bags,
                                            at<const float>(weights), out.data(), 0, threads});
           },
           Release())
      .def("gather",
           [](Shard& s, const PyTicket& t, const Plan* plan, Address offsets, std::int64_t bags,
              Address weights, const Addresses& outputs, std::int64_t global_step,
              int threads) {
             const std::vector<void*> out = all_at<void>(outputs);
             s.gather(*t.ticket, GatherArgs{plan, at<const std::int64_t>(offsets), bags,
                                                  at<const float>(weights), out.data(),
                                                  global_step, threads});
           },
           "ticket"_a, "plan"_a.none(), "offsets"_a, "bags"_a, "weights"_a, "outputs"_a,
           "global_step"_a, "threads"_a, Release());
  shard.def("find_or_init", [](std::shared_ptr<Shard> s, const PyGroups& g, Address counts,
                               std::int64_t global_step, std::uint32_t event_time_s, int threads) {
    std::unique_ptr<Ticket> ticket;
    {
      const nb::gil_scoped_release release;
      ticket = s->find_or_init(g.get(), at<const std::int64_t>(counts), false,
                                     step_of(global_step, event_time_s), threads);
    }
    return std::unique_ptr<PyTicket>(new PyTicket{std::move(s), std::move(ticket)});
  });
}

void bind_updates(nb::class_<Shard>& shard) {
  shard
      .def("apply",
           [](Shard& s, const std::vector<GradArgs*>& records, std::vector<double> lrs,
              std::int64_t global_step, std::uint32_t event_time_s, int nan_policy,
              double nan_clip, int threads) {
             s.apply(ApplyArgs{records, std::move(lrs),
                               step_of(global_step, event_time_s, nan_policy, nan_clip), threads});
             for (GradArgs* record : records) s.end(*record->ticket);
           },
           Release())
      .def("sum", &Shard::sum, Release())
      .def("apply_ids",
           [](Shard& s, const PyGroups& g, Address counts, const Addresses& grads,
              const Addresses& seen, std::vector<double> lrs, std::int64_t global_step,
              std::uint32_t event_time_s, int nan_policy, double nan_clip, int threads) {
             GradArgs record{nullptr, nullptr, nullptr, 0, nullptr, all_at<void>(grads), 1.0,
                             all_at<void>(seen)};
             s.apply_ids(g.get(), at<const std::int64_t>(counts),
                         ApplyArgs{{&record}, std::move(lrs),
                                   step_of(global_step, event_time_s, nan_policy, nan_clip),
                                   threads});
           },
           Release())
      .def("write",
           [](Shard& s, const PyGroups& g, int mode, const Addresses& values,
              Address status, std::int64_t global_step, std::uint32_t event_time_s, int threads) {
             const std::vector<void*> value = all_at<void>(values);
             s.write(g.get(), static_cast<Shard::Write>(mode), value.data(),
                           at<std::int32_t>(status), step_of(global_step, event_time_s), threads);
           },
           Release());
}

void bind_upkeep(nb::class_<Shard>& shard) {
  shard.def("evict", &Shard::evict, Release())
      .def("remove", &Wired<&Shard::remove>::call, Release())
      .def("close_version", &Shard::close_version, Release())
      .def("release", &Shard::release, Release())
      .def("leave", &Shard::leave, Release())
      .def("incarnation", &Shard::incarnation, Release())
      .def("clear", &Shard::clear, Release())
      .def_prop_rw("last_step", &Shard::last_step, &Shard::set_last_step)
      .def("export",
           [](Shard& s, int t) { return s.export_rows(t, nullptr); }, Release())
      .def("entry",
           [](Shard& s, int t, std::int64_t id) { return s.export_rows(t, &id); },
           Release())
      .def("load", &Wired<&Shard::load_rows>::call, Release())
      .def("expect", &Shard::expect, Release())
      .def("size",
           [](Shard& s, int t) {
             const ReadGuard guard(s.lock());
             return s.table(t).index().size();
           },
           Release())
      .def("stats", [](Shard& s, int t) {
        const ReadGuard guard(s.lock());
        const Table& table = s.table(t);
        nb::dict d;
        d["rows"] = table.index().size();
        d["weights"] = table.arena().weight_bytes();
        d["state"] = table.arena().state_bytes();
        d["metadata"] = table.arena().metadata_bytes();
        d["index"] = table.index().bytes() + table.admission().bytes();
        d["slots"] = table.index().slots();
        d["inserted"] = table.counters().inserted;
        d["refused"] = table.counters().refused;
        d["evicted"] = table.counters().evicted;
        d["nonfinite"] = table.counters().nonfinite;
        return d;
      });
  shard
      .def("admission_counts",
           [](Shard& s, int t) {
             const WriteGuard guard(s.lock());
             std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>> out;
             s.table(t).admission().export_exact(out.first, out.second);
             return out;
           })
      .def("admission_cells",
           [](Shard& s, int t) {
             const WriteGuard guard(s.lock());
             const auto& cells = s.table(t).admission().cells();
             return nb::bytes(reinterpret_cast<const char*>(cells.data()), cells.size() * 4);
           })
      .def("load_admission", [](Shard& s, int t, const std::vector<std::int64_t>& ids,
                                const std::vector<std::int64_t>& counts, const nb::bytes& cells) {
        const WriteGuard guard(s.lock());
        Admission& admission = s.table(t).admission();
        if (cells.size() > 0) {
          std::vector<std::uint32_t> copy(cells.size() / 4);
          std::memcpy(copy.data(), cells.c_str(), copy.size() * 4);
          admission.load_cells(copy.data(), copy.size());
        } else {
          admission.load_exact(ids.data(), counts.data(), static_cast<std::int64_t>(ids.size()));
        }
      });
}

}  // namespace
}  // namespace shoal

NB_MODULE(_core, m) {
  using namespace shoal;
  // Tables may live until the interpreter ends; that is no leak of ours.
  nb::set_leak_warnings(false);
  m.doc() = "Compiled core of Shoal: tables on the CPU. Use shoal.table, not this.";
  nb::exception<TableFullError>(m, "TableFullError");
  nb::exception<NonFiniteError>(m, "NonFiniteError");
  nb::exception<TicketStateError>(m, "TicketStateError");
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const ForkedError& error) {
      PyErr_SetString(nb::module_::import_("shoal.errors").attr("ShoalError").ptr(), error.what());
    }
  });
  bind_values(m);
  bind_checksums(m);
  bind_launch(m);
  m.def("instruction_set", [] { return kernels().instruction_set; });
  nb::class_<Shard> shard(m, "Shard");
  shard.def("__init__", [](Shard* self, const std::vector<nb::dict>& specs) {
    std::vector<TableSpec> tables;
    for (const nb::dict& spec : specs) tables.push_back(table_from(spec));
    new (self) Shard(std::move(tables));
  });
  bind_lookups(shard);
  bind_updates(shard);
  bind_upkeep(shard);
  bind_snapshot(m, shard);
  bind_row_images(m);
  nb::module_ ops = m.def_submodule("ops", "Operators of shoal.ops, on addresses it has checked.");
  bind_ids_ops(ops);
  bind_rows_ops(ops);
  bind_segment_ops(ops);
  bind_layout_ops(ops);
  bind_shared_memory(m);
  m.def("ordered_by_hash",
        &Wired<&ordered_by_hash>::call, Release());
}
