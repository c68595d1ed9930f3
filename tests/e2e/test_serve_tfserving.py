"""tensorflow-serving-api as it is, in one process with Shoal: `make test-tfserving`.

The package brings all of TensorFlow, so that it is not among the packages of tests.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import grpc
import numpy as np
import pytest

from support.served_models import serving, tiny_inputs, trained

if importlib.util.find_spec("tensorflow_serving") is None:
    pytest.skip("tensorflow-serving-api is not installed", allow_module_level=True)


@pytest.mark.filterwarnings("ignore")
def test_tensorflow_serving_api(tmp_path: Path) -> None:
    import tensorflow as tf
    from tensorflow_serving.apis import (
        get_model_status_pb2,
        model_service_pb2_grpc,
        predict_pb2,
        prediction_service_pb2_grpc,
    )

    run = trained(tmp_path)
    with serving(run) as (server, models), grpc.insecure_channel(server.grpc_address) as channel:
        inputs = tiny_inputs(5)
        request = predict_pb2.PredictRequest()
        request.model_spec.name = "tiny"
        for name, array in inputs.items():
            request.inputs[name].CopyFrom(tf.make_tensor_proto(array))
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        found = tf.make_ndarray(stub.Predict(request, timeout=60).outputs["prediction"])
        assert np.array_equal(found, models.get("tiny").predict(inputs)["prediction"])
        status = get_model_status_pb2.GetModelStatusRequest()
        status.model_spec.name = "tiny"
        asks = model_service_pb2_grpc.ModelServiceStub(channel)
        (one,) = asks.GetModelStatus(status, timeout=60).model_version_status
        assert one.state == get_model_status_pb2.ModelVersionStatus.AVAILABLE
        with pytest.raises(grpc.RpcError) as caught:
            request.model_spec.name = "other"
            stub.Predict(request, timeout=60)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
