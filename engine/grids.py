"""Constant tables of block formats: the grids and signs of the IQ types, and what 4-bit codes of iq4_nl and of FP4 stand for.

A grid is a set of points with a few values in each of 4 or 8 dimensions; a code is the number of a point. Points are sorted as numbers
whose lowest digit is the first element, so a grid is the set alone: a bitmap over all such numbers, deflated, in base 85.
"""

from __future__ import annotations

import zlib
from base64 import b85decode

import numpy as np
from numpy.typing import NDArray

_IQ2_XXS = (
    "c-nPRORB^$43oj#tB`je2YP^R=KfcCw)5@K5e=lV<VbEmf91ogR%p3E0BR^O#16P=^@J3)+t0mx___f>P^zDolEn6;is&dxI!#Zg_{KuzkVd4Mw`?l*l~*(z5~c8Qj-!"
    "-YZym34v`$TQ4<4*~)dpL;rq|+W4irx`d$&)6^vGb7UkLBrzcFbHqcf>sMFwRxr;MTG;*}m%Qlby-@@TSk)X7om@@#uKQIjUUWQ&$2&y}*gX5TV=Bc|Cuh1wL(2Kn3A3"
    "Yj<N%;gblzhT7_jxp@MF=lA5st5R^Hl2J=^JV`E{Z0D^#$6R7"
)
_IQ2_XS = (
    "c-mc2TdsvL2pkgnkBRPwCicH3cK=&BJX-bM<{ZTW!^|+oxJIi-qkD|rsuaR~iB<*?x~C4>8J0pJW<V>X*vo#SY&(-c)w(<-fCU6QVt|)*=>oJ=N8h~B3mmYKBw*Y)Ca<"
    "s*uvOak7T*la5<g=kAh?T96(5+bR(Mt@J=L5^n!u1sF+~=p=RjVCGbM+vDH*59tF!>kC`)-u3GzO}jM8X_r-*1ytubG*&a^iqGs?p-do}D8x2NWXU?%O)=7t88q040Rd"
    "J=Ak)9T+$YBcFD31^6BC_W+mG1}iEA-T}Oj@u6-pQ1yByIl9%`W3mW#F%j~<yh(N0zSL~oH^Zy%}}tQx4=M73#xoc?jNErTmD?iDs40;(&MG>YYMNuDE=SK;cc#9vM%q"
    "_=>7msuqjC"
)
_IQ2_S = (
    "c-n1JU5W-F3~NE(E9iYHjPDBe{#V(wI=kPpE5rQ7#3X8F%Z9aF@G^(h-0EI3Em0|W3^QwctZ7zp0a8G#rYWS&oF&YfEj@sgh^u5FBBgC>LAkBEEtarKv-X}c)kMD5E9g"
    ")N*35uFS6j&;COQ!QC2=T0oAzp}=fs8f?3xctXeG?g^dQAA!2(KVP=j1x!<Qgx@l7F)Pu!TMd$m>{ZzEray(N$AzRb24)#*U9zYZZF^+2!@EVQ9?ARiEH!J<ErE8usn4"
    "?()-BQhW*1pE<<S|Z6aT82aQO}QP4+el6zUY~*z7~Sl6pK?p!Q_DMIhH4w7?joIO9P^#Dw9CRS7mu8OBC|vDii4FoWN_zK9m?6y$}qXC*pyH_2f!)+bXep&HXz~CYasM"
    "7Fd3(JhmM~KIbkHJ7yU4;E692~{FNElHOf~Fzm+TBn!W(JyjC6"
)
_IQ3_XXS = (
    "c-l=-F%H5o3_M%0RAmZ7_lgPeigaLyA4Q!IuVCbv_?)J2Rn;aw-<^~BWtxCXwzFx0%xW)eST<YW5KL&L;j#hAAHoX-c)&}FY<X@1m|7IGsjrX>q7@bAuHrcP3L2_`6x)"
    "_>^v5;&o?@Fdagv_Uo9H*utGOGEJ93R6P|L2rgx{U}Y-UnrS3sKYtPIbF!WdDS7|dsT<9UQCqzhJe8+4kK5km%XvHjm=J(sMgqk-e3v^zjTJayVggoDWMJzTWE4a0T)3"
    "l-9P!ydlNePrBA?Xny*@kmBo4W|8$?wEo20v5Uy_5"
)
_IQ3_S = (
    "c-k#d!AiqG5PdVu!e&pqA>uXNMyUCUt<-~hDT4SrX{pfmmf{D9Rs{Q#&TgE;z`Qr}-rMBob#A|%IbF{W(Id*&Lkwq!%0~0(%@Ao{OU0lD_x2OXCI^OquXIKLt}o^pYnG"
    "?L6&oz+9HeSVPSrN(A}t!YmF^Xmp*3Qy-5G8(e|b5Y-VC?q(AA>+32wuC)HmEXp@c1}PT|h83}iuXSwt^ePGkv?U+Lf3a_=1ov?9@{igP&9v4ypFswx3&TJZ@M2_=SuX"
    ">*z&qp%+CoXl)ge8!drA@5Agyn!FG+()?*sDei}n1QT95(J|p-wR7#Aht{0!Hx!aZfy;cl!bD4D3uqR(zW`GY5;6>@R{_|3X$jRqNR^eu)^e<Ll^vCYlKPU1;QQ+o$IB"
    "(hKom+bHx0SXmXXwyZnVo8~6jd#wQ>"
)
_IQ1_S = (
    "c-k#eK}(!R7=CxE;dM-9V?RN1diSfb(^(PgE$L;EU0C#DLh=VZ*|bQ>IZZw%yXlwN6ha`hG?#HO$v6$G@ldv(umMk2dT8mb2WdTox*h^v8VtnDuD#8?@Vw9Syw7v(LR2"
    "?w<}y}3b9YJG^C&5*&qs>Nl?x;NhAB!%0hRecnsm$a2YwJ@;QqccSPG~@n#@N5uBY$^gNY22s7}?HYgoxmY#Y+!Ajh1yxWA4l1OzVO1-XRyWBes^wA;LAoBq<x!%nuPh"
    "FWp9`{&R@7DG%<XIwD^Is3Q$Jf@<B<<hd(0^?jzIHG8vQn*?-$Ub(LsHW&@kYNcQ%|}dP%c;av8KJU^mWiJv*28-WD<$YEG%#}+D!ES;XeDuFD(VlG#i@A4$V;H%7rH5"
    "2w&LB_pg1xSvl=L<CZ@9?{WdkSxbxSuMq|l64F4MqT|O(RS}O@H(bLXvHn!_OntvSw2GXTKiD_6XGLxujp0!)qyF+V=7Bv?g3oFy??D1-6?{(2le%HQrc>Le(m#@Cb_P"
    "%)g$;r#{<KcsUbe#9?p_<1{H>jE?+1SCIq;Fwj@yPMjA_U90?}vdY$)D1%>fQq-z{36HBT$I&mG*v%J#A~V%aSj@pZtCEAg}V1eou`2@uUxU_YQ=)6;l3U7EjmAKr#y2"
    "F0kdO91c}@u6ikZ68>90+)KINV7E3oVy0wcNC7Qg*Gnz$6Ckekcj5w;yQl$8BcV}uIeIA*;9XR~L2uzcrHYS+2)y-rqrtcg6e{stpn$cM#il(dTBx(R&0u-;P1DmAvG}"
    "u@dX;b%ns9v~6p49X^c}lqEMlIFjzJBbrp$X4T{{D_p5YV7e^~xM<^E7<_56qcAaL=FI+lT|4v2#Y&dpW2-Egd@Fdf5G@Dheeu*|v(bMFD;1sQ1"
)


def _grid(packed: str, ndim: int, values: list[int]) -> NDArray[np.int8]:
    """The points of a bitmap over len(values) ** ndim numbers: int8 [points, ndim]."""
    numbers = np.flatnonzero(np.unpackbits(np.frombuffer(zlib.decompress(b85decode(packed)), np.uint8), bitorder="little"))
    levels = numbers[:, None] // len(values) ** np.arange(ndim) % len(values)
    grid: NDArray[np.int8] = np.array(values, np.int8)[levels]
    grid.flags.writeable = False
    return grid


IQ2_VALUES, IQ3_XXS_VALUES, IQ3_S_VALUES = [8, 25, 43], [4, 12, 20, 28, 36, 44, 52, 62], [1, 3, 5, 7, 9, 11, 13, 15]
GRIDS: dict[str, NDArray[np.int8]] = {
    "iq2_xxs": _grid(_IQ2_XXS, 8, IQ2_VALUES), "iq2_xs": _grid(_IQ2_XS, 8, IQ2_VALUES), "iq2_s": _grid(_IQ2_S, 8, IQ2_VALUES),
    "iq3_xxs": _grid(_IQ3_XXS, 4, IQ3_XXS_VALUES), "iq3_s": _grid(_IQ3_S, 4, IQ3_S_VALUES), "iq1_s": _grid(_IQ1_S, 8, [-1, 0, 1])}
"""Format -> its points, int8 [points, 8 or 4]: magnitudes, whose signs are kept elsewhere, or (iq1_s, iq1_m) values."""

SIGNS: NDArray[np.uint8] = np.array([i | i.bit_count() % 2 << 7 for i in range(128)], np.uint8)
"""7 bits -> the signs of 8 elements (bit j: element j is negative); the eighth makes their number even."""

IQ4_NL: NDArray[np.int8] = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
"""What the 4-bit codes of iq4_nl and iq4_xs stand for."""

FP4: NDArray[np.int8] = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""E2M1 (mxfp4, nvfp4) doubled: the highest bit is the sign."""
