from enum import Enum

RequestOutputKind = Enum("RequestOutputKind", ["CUMULATIVE", "DELTA", "FINAL_ONLY"])
