"""Names of TorchRec and TorchEasyRec."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal import DistributedModelParallel, EmbeddingCollection, Feature, Layout, LayoutSlice, comm
from shoal.compat import torchrec
from shoal.errors import ConfigError, DTypeError, InputError, ShapeError, UnknownName
from shoal.pipeline import TrainPipeline
from shoal.ragged import KeyedRagged
from support.pipeline_runs import spec, toy


@pytest.fixture(autouse=True)
def alone() -> Any:
    yield
    comm.shutdown()


def collection(name: str = "t") -> EmbeddingCollection:
    made = spec(name)
    layout = Layout("out", "concat", (LayoutSlice("f", made.segments[0].name),))
    return EmbeddingCollection([made], [Feature("f", name)], [layout])


class Bags(nn.Module):
    """As TorchRec's EmbeddingBagCollection keeps its tables."""

    def __init__(self, **widths: int) -> None:
        super().__init__()
        bags = {name: nn.EmbeddingBag(5, dim) for name, dim in widths.items()}
        self.embedding_bags = nn.ModuleDict(bags)


def test_weights_of_an_embedding_bag_collection_are_rows_by_number() -> None:
    tables = collection()
    source = Bags(t=tables.tables["t"].dim)
    assert torchrec.import_weights(tables, source) == {"t": 5}
    ids = KeyedRagged.from_lists({"f": [[3], [0, 4]]})
    weight = source.embedding_bags["t"].weight
    expected = torch.stack([weight[3], weight[0] + weight[4]])
    torch.testing.assert_close(tables.eval()(ids)["out"], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_take_the_dtype_of_their_table(dtype: torch.dtype) -> None:
    tables = collection()
    source = Bags(t=tables.tables["t"].dim).to(dtype)
    torchrec.import_weights(tables, source)
    found = tables.table("t").lookup(list(range(5)))
    torch.testing.assert_close(found, source.embedding_bags["t"].weight.detach().float())


def test_weights_of_a_state_dict_are_those_of_its_tables() -> None:
    tables = collection()
    model = nn.ModuleDict({"sparse": Bags(t=tables.tables["t"].dim), "over": nn.Linear(2, 1)})
    assert torchrec.import_weights(tables, model.state_dict()) == {"t": 5}
    weight = model.state_dict()["sparse.embedding_bags.t.weight"]
    torch.testing.assert_close(tables.table("t").lookup([0, 4]), weight[[0, 4]])
    with pytest.raises(InputError, match="dict"):
        torchrec.import_weights(tables, {"over.weight": weight})


def test_weights_that_do_not_fit_are_refused() -> None:
    tables = collection()
    with pytest.raises(UnknownName, match="other"):
        torchrec.import_weights(tables, Bags(other=4))
    dim = tables.tables["t"].dim
    with pytest.raises(ShapeError, match="weights of table 't'"):
        torchrec.import_weights(tables, Bags(t=dim + 1))
    for weights in (torch.zeros(2, dim, dtype=torch.float64), torch.zeros(2, dim).to_sparse()):
        with pytest.raises(DTypeError, match="weights of table 't'"):
            torchrec.import_weights(tables, {"embedding_bags.t.weight": weights})
    with pytest.raises(DTypeError, match="int8; allowed: dense numbers"):
        torchrec.import_weights(
            tables, {"embedding_bags.t.weight": torch.zeros(2, dim, dtype=torch.int8)}
        )
    with pytest.raises(UnknownName, match="other"):
        torchrec.import_weights(tables, Bags(t=dim, other=dim))
    with pytest.raises(InputError, match="one name twice"):
        torchrec.import_weights(tables, nn.ModuleDict({"one": Bags(t=dim), "two": Bags(t=dim)}))
    assert len(tables.table("t")) == 0  # nothing was written ahead of what is refused
    with pytest.raises(InputError, match="Linear"):
        torchrec.import_weights(tables, nn.Linear(1, 1))


def test_ranks_start_and_a_model_trains_under_the_names_of_torchrec() -> None:
    device, backend = torchrec.init_process_group()
    assert (device.type, backend) == (comm.init().device.type, comm.init().backend)
    made = toy((spec(),))
    pipeline = torchrec.TrainPipelineSparseDist(made.model, made.optimizer, torch.device("cpu"))
    assert isinstance(pipeline, TrainPipeline)
    model = torchrec.DistributedModelParallel(collection(), device=device)
    assert isinstance(model, DistributedModelParallel)


@pytest.mark.parametrize(
    "given",
    [
        {"init_parameters": False},
        {"init_data_parallel": False},
        {"sharders": [object()]},
        {"device": "meta"},
    ],
)
def test_arguments_without_a_meaning_here_are_refused(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ConfigError, match=f"{name} of DistributedModelParallel"):
        torchrec.DistributedModelParallel(collection(), **given)
