"""Monolith's names."""

from shoal.compat.monolith.sync_training import (  # noqa: F401
    SessionConfig,
    SyncFlags,
    bps_init,
    enable_sync_training,
    get_device_str,
    get_mpi_local_rank,
    get_mpi_local_size,
    get_mpi_rank,
    get_mpi_size,
    get_sync_run_hooks,
    init_sync_train_and_update_conf,
    try_init_cuda,
    update_session_config_for_gpu,
    use_flags,
)
